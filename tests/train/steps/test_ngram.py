"""The n-gram model against probability theory and against the same formula written with dictionaries.

Tests: ddp/train/steps/task.py.
"""

import lzma
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.train.steps.task import ngram_bits_per_byte, xz_bits_per_byte

TRAIN = b"abracadabra, said the magician; abracadabra!"
few_bytes = st.binary(max_size=40) | st.text("ab\0\xff", max_size=40).map(lambda text: text.encode("latin1"))


def witten_bell(train: bytes, history: bytes, byte: int) -> float:
    """p(byte | history), by the recursion in words."""
    shorter = witten_bell(train, history[1:], byte) if history else 1 / 256
    following: dict[bytes, Counter[int]] = defaultdict(Counter)
    for i in range(len(train) - len(history)):
        following[train[i : i + len(history)]][train[i + len(history)]] += 1
    seen = following[history]
    if not seen:
        return shorter
    return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen))


@settings(max_examples=40, deadline=None)
@given(train=few_bytes, held_out=few_bytes.filter(len), order=st.integers(1, 6))
def test_equals_the_recursion_in_words(train: bytes, held_out: bytes, order: int) -> None:
    bits = [
        -math.log2(witten_bell(train, held_out[max(0, i - order + 1) : i], byte)) for i, byte in enumerate(held_out)
    ]
    assert ngram_bits_per_byte(train, held_out, order) == pytest.approx(sum(bits) / len(bits), rel=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prefix", [b"", b"abr", b"zzz", b"\0"])
@pytest.mark.quick(2)
def test_next_bytes_probabilities_sum_to_one(order: int, prefix: bytes) -> None:
    def probability(text: bytes) -> float:
        return 2 ** (-ngram_bits_per_byte(TRAIN, text, order) * len(text)) if text else 1.0

    total = sum(probability(prefix + bytes([byte])) for byte in range(256))
    assert total == pytest.approx(probability(prefix), rel=1e-9)


def test_a_longer_history_helps_where_there_is_structure_and_noise_stays_noise() -> None:
    words = np.random.RandomState(0).choice([b"spam ", b"eggs ", b"ham ", b"knights "], size=6000)
    text = b"".join(words.tolist())
    bits = [ngram_bits_per_byte(text[:20_000], text[20_000:], order) for order in (1, 2, 3, 5)]
    assert bits == sorted(bits, reverse=True)
    mean_length = np.mean([len(word) for word in (b"spam ", b"eggs ", b"ham ", b"knights ")])
    assert bits[-1] == pytest.approx(2 / mean_length, rel=0.1)  # two bits choose one of four words

    noise = np.random.RandomState(1).bytes(40_000)
    assert ngram_bits_per_byte(noise[:20_000], noise[20_000:], 1) == pytest.approx(8, rel=0.01)


def test_xz_profits_from_what_it_has_seen() -> None:
    noise = np.random.RandomState(2).bytes(20_000)
    assert xz_bits_per_byte(b"", noise) == pytest.approx(8, rel=0.02)
    assert xz_bits_per_byte(noise, noise) < 0.2
    text = TRAIN * 20
    assert xz_bits_per_byte(b"", text) < len(lzma.compress(text, preset=9)) * 8 / len(text)
