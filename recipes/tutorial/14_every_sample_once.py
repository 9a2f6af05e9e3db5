"""14 · Every sample once

An epoch can go wrong without an error. How does it happen, on 6 files and 3 ranks, and what makes it impossible?

    files of 3, 2, 2, 2, 2 and 1 samples      files[rank::3]                     files dealt to lanes
                                              rank 0   3 + 2 = 5                 lane 0   4 samples of two files
                                              rank 1   2 + 2 = 4                 lane 1   4 samples of two files
                                              rank 2   2 + 1 = 3  ◀── ends       lane 2   4 samples of three files
"""

from collections import Counter
from itertools import chain

import numpy as np
import torch
from problem import NUM_SAMPLES, answer, batch, gradient_of_sum

from ddp.data.orders.order import Blocks, Checksum, Permutation
from ddp.data.orders.sampler import sampler_of

FILE_SIZES, SHARDS, BATCH = [3, 2, 2, 2, 2, 1], 3, 9
ENDS = np.cumsum(FILE_SIZES)
FILES = [list(range(end - size, end)) for size, end in zip(FILE_SIZES, ENDS, strict=True)]


class Samples(list):
    """Numbers of samples, which say how many lie in each file."""

    file_sizes = FILE_SIZES


# ## Three ways to be wrong
#
# A reader that knows nothing of ranks gives the whole stream to each of them, and to each of its loader processes.
# Files that are dealt to *ranks* end at different times: either ranks wait for others for ever, or what is left is
# dropped. And a position that counts a rank's own samples means other samples once there are more ranks, or fewer.


def of_rank(rank: int, p: int) -> list[int]:
    """Returns what a rank reads if files are dealt to ranks."""
    return list(chain(*FILES[rank::p]))


def until_the_first_ends(p: int) -> list[int]:
    """Returns what is read if all ranks stop with the first that is done."""
    shares = [of_rank(rank, p) for rank in range(p)]
    return list(chain(*(share[: min(map(len, shares))] for share in shares)))


def resumed(before: int, after: int, done: int) -> list[int]:
    """Returns what is read if each rank goes on after so many samples of its own, but as one of `after` ranks."""
    first = (of_rank(rank, before)[:done] for rank in range(before))
    return list(chain(*first, *(of_rank(rank, after)[done:] for rank in range(after))))


# ## Lanes
#
# The library deals files to the *shards* of a batch, and shards to ranks. *Lane* v is a run of the shuffled files, as
# long as the other lanes; shard v of every step takes its next samples. The number of shards is fixed for a run, and
# the number of ranks is not. So a step has the same samples on any number of ranks, a rank opens the files of its own
# lanes only, and the position of a run is one number, which counts the samples of all ranks. The order's key is (seed,
# epoch).


def steps_of(p: int, *, epoch: int = 0, consumed: int = 0) -> list[list[list[int]]]:
    """Returns the samples of each rank in each step, from a position of an epoch on."""
    ranks = []
    for rank in range(p):
        choices = {"global_batch": BATCH, "rank": rank, "world_size": p, "num_shards": SHARDS}
        order = Blocks(FILE_SIZES, window=2)  # samples are mixed two at a time
        sampler, _ = sampler_of(Samples(range(NUM_SAMPLES)), order=order, sharding="file", **choices)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": consumed})
        ranks.append([[index for part in plan.micros for index in part.indices] for plan in sampler.plans()])
    return [list(shares) for shares in zip(*ranks, strict=True)]


# ## Three numbers
#
# To see whether an epoch was whole, nobody has to list what was read. The number of the samples, their sum, and their
# exclusive or add up over the ranks, and are known beforehand. `ddp.fit` compares them at the end of each epoch.


def is_whole(read: list[int]) -> bool:
    """Returns True if these are all samples, once each, as far as three numbers can tell."""
    return Checksum.of(np.array(read)) == Permutation(NUM_SAMPLES).checksum()


if __name__ == "__main__":
    lost, again = set(range(NUM_SAMPLES)) - set(until_the_first_ends(3)), Counter(resumed(3, 2, 3))
    twice = sum(number > 1 for number in again.values())
    print(f"of 12 samples, lost at the end: {len(lost)}; resumed: {twice} twice, {NUM_SAMPLES - len(again)} never")
    assert not any(map(is_whole, (list(range(NUM_SAMPLES)) * 3, until_the_first_ends(3), resumed(3, 2, 3))))
    whole = [list(chain(*shares)) for shares in steps_of(1)]  # of 9 samples, and of 3
    inputs, classes = batch()
    for p in (1, 2, 3):
        steps = steps_of(p)
        assert [list(chain(*shares)) for shares in steps] == whole and is_whole(list(chain(*whole)))
        assert [list(chain(*shares)) for shares in steps_of(p, consumed=BATCH)] == whole[1:] and len(whole) == 2
        assert steps_of(p, epoch=1) != steps and is_whole(list(chain(*chain(*steps_of(p, epoch=1)))))
        mine = [sorted(chain(*(shares[rank] for shares in steps))) for rank in range(p)]
        opened = [set(np.searchsorted(ENDS, each, "right").tolist()) for each in mine]
        assert sum(map(len, opened)) <= len(FILES) + SHARDS - 1
        assert torch.allclose(sum(gradient_of_sum(inputs[each], classes[each]) for each in mine) / 12, answer())

# ## What to look at
#
# ![An epoch of 6 files on 1, 2 and 3 workers](pictures/epoch.svg)
#
# ## The number that surprised
#
# 0: so many errors do the three wrong ways raise. The loss falls all the same.
#
# ## Exercises
#
# 1. Deal the files to ranks so that `until_the_first_ends` loses nothing. Does your way work with 2 ranks, too?
# 2. Write an epoch that is wrong and passes `is_whole`. Which mistakes do the three numbers not notice?
#
# ## Next
#
# `15_who_starts_it.py`: how a process learns which rank it is. `docs/data.md` has the settings of this chapter.
