"""`python -m ddp simulate` and `explain`. (`draw` and `check` are tested beside the schedules, an answer of `explain`
with the commands of the README.)"""

from __future__ import annotations

import pytest

from ddp.__main__ import main
from ddp.bench.offers import OFFERS


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_simulate_gives_the_textbook_s_time_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Ring, 8 ranks, 8 MB at 8 Gbit/s, no latency, next to no cost of adding: 14 rounds of 1 MB at 1 GB/s."""
    free = ("--alpha", "0us", "--rate", "8gbit", "--add-gb-s", "1e9")
    text = answer(capsys, "simulate", "ring", "8", "--bytes", "8MB", *free)
    assert text.startswith("ring, 8 ranks on 8 hosts, 8MB: 14.7 ms\n")
    assert "14 rounds, 112 messages" in text
    assert "sent by the busiest rank 14,680,064 bytes (1.75 times the buffer)" in text
    assert text.rstrip().endswith("bus bandwidth 1 GB/s")


def test_simulate_ten_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "simulate", "tree", "10000", "--bytes", "4KB", "--per-host", "8")
    assert "tree, 10,000 ranks on 1,250 hosts" in text
    assert "28 rounds, 19,998 messages" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ring 4 --rate fast", "rate 'fast': give e.g. 10gbit"),
        ("ring 4 --alpha 5", "latency '5': give e.g. 20us"),
        ("ring 4 --bytes 5B", "size '5B': want a multiple of 4 bytes"),
        ("ring 4 --per-host 0", "--per-host 0: give at least 1"),
        ("ring 4 --per-host 2 --hosts 2,2", "--hosts and --per-host both say who shares a host"),
        ("rang 4", "Did you mean ring?"),
    ],
)
def test_what_simulate_refuses(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words.split()])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_explain_needs_company(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "25MB", "--workers", "1"])
    assert "one worker alone has nothing to reduce; take 2 or more" in capsys.readouterr().err


def test_help_has_a_line_and_an_example_for_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed, _, examples = text.partition("examples:")
    for question in ("train", "draw", "check", "simulate", "explain", "exercise"):
        assert f"\n    {question} " in listed and f"\n  python -m ddp {question} " in examples


def test_explain_hooks_where_gradients_travel(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "1MB", "--hooks", "--transport-only", "--compute", "2s")
    title, header, *rows = answer(capsys, *words).splitlines()
    assert title == (
        "gradients of 1,048,576 bytes, as 1 matrix of 512 × 512, between 2 hosts, in a step that computes for 2.00 s"
    )
    assert header.split() == ["leaves", "a", "host", "encoding", "network", "step", "plain", "÷", "step"]
    assert [row.split("  ")[0] for row in rows] == list(OFFERS)
    assert all(row.endswith(" s  1.00") or float(row.split()[-1]) > 0.5 for row in rows)  # computing takes longest


def test_explain_hooks_in_a_host_s_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "explain", "1MB", "--hooks") == (
        "all workers share a host's memory: no gradient travels, and any wire format or hook would only cost time\n"
    )


def test_explain_hooks_refuses_what_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "25MB", "--hooks", "--compute", "soon"])
    assert "--compute soon: want a time, e.g. 250ms" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "25MB", "--compute", "3s"])
    assert "--compute 3s: goes with --hooks" in capsys.readouterr().err
