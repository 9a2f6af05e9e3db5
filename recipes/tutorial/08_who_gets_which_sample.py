"""08 · Who gets which sample

Every rank has all samples on disk. Which ones does it read, without asking the others, and are they all counted once?

    10 samples, 4 ranks     strided, padded to 12                      contiguous, nothing padded
                            rank 0   0 4 8                             rank 0   0 1
                            rank 1   1 5 9                             rank 1   2 3 4
                            rank 2   2 6 0 ◀── a second time           rank 2   5 6
                            rank 3   3 7 1 ◀── a second time           rank 3   7 8 9
"""

from itertools import chain

import torch
from problem import NUM_SAMPLES, answer, batch, gradient_of_sum
from torch.utils.data import DistributedSampler

import ddp

# ## An order that all ranks know
#
# Shuffling needs no message. An *epoch* is one pass over all samples, and a *permutation* is their order in it. All
# ranks draw the same one from the same seed and epoch. A *sampler* then says which of the samples a rank reads. Torch's
# sampler must be told of each epoch by `set_epoch`, or else it repeats the same order.


def order(length: int, epoch: int, *, seed: int = 0) -> list[int]:
    """Returns the samples in the order of an epoch, the same on every rank; drawn as torch's sampler draws it."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def strided(samples: list[int], rank: int, p: int) -> list[int]:
    """Returns a rank's samples as torch's sampler cuts them: every p-th, padded from the beginning to equal numbers."""
    padded = samples + (samples * p)[: -len(samples) % p]
    return padded[rank::p]


def contiguous(length: int, rank: int, p: int) -> range:
    """Returns a rank's samples so that each belongs to one rank; two ranks differ by one sample at most."""
    return range(rank * length // p, (rank + 1) * length // p)


# ## Evaluation counts
#
# Padding keeps ranks in step, and in training a few repeated samples do little harm. In an evaluation they change the
# result, and how much depends on the number of ranks; so does a mean of the ranks' means, where shares are unequal. The
# sum of the ranks' sums, divided by the sum of their counts, is exact.


def accuracies(is_right: list[int], p: int) -> tuple[float, float, float]:
    """Returns the accuracy over padded shares, as a mean of the ranks' means, and from sums and counts."""
    length = len(is_right)
    padded = [is_right[index] for rank in range(p) for index in strided(list(range(length)), rank, p)]
    shares = [[is_right[index] for index in contiguous(length, rank, p)] for rank in range(p)]
    means = [sum(share) / len(share) for share in shares]
    return sum(padded) / len(padded), sum(means) / p, sum(map(sum, shares)) / sum(map(len, shares))


# ## Training in steps
#
# `ddp.TrainSampler` cuts each epoch into steps of a *global batch*, the samples of all ranks together, and each step
# into shares. Nothing is padded or dropped: the last step of an epoch is smaller. A step has the same samples for every
# number of ranks, so a run can continue on more or fewer. Its position is: seed, epoch, number of samples used.


def shares_of_rank(length: int, rank: int, p: int, global_batch: int) -> list[list[int]]:
    """Returns a rank's samples in each step of an epoch."""
    sampler = ddp.TrainSampler(length, global_batch=global_batch, rank=rank, world_size=p, seed=3)
    return [[index for part in plan.micros for index in part.indices] for plan in sampler.plans()]  # parts: chapter 09


def samples_of_steps(length: int, p: int, global_batch: int) -> list[list[int]]:
    """Returns the samples of each step of an epoch, of all ranks together."""
    steps = list(zip(*(shares_of_rank(length, rank, p, global_batch) for rank in range(p)), strict=True))
    assert all(max(map(len, shares)) - min(map(len, shares)) <= 1 for shares in steps)
    return [list(chain(*shares)) for shares in steps]


if __name__ == "__main__":
    for length in (1, 7, 10, 12, 64):
        for p in range(1, 9):
            whole, steps = list(range(length)), samples_of_steps(length, 1, 8)
            assert sorted(chain(*steps)) == whole and samples_of_steps(length, p, 8) == steps
            assert list(chain(*(contiguous(length, rank, p) for rank in range(p)))) == whole
            for rank in range(p):
                assert ddp.EvaluationSampler(length, num_replicas=p, rank=rank).share == contiguous(length, rank, p)
                for sampler in (DistributedSampler, ddp.DistributedSampler):
                    theirs = sampler(whole, num_replicas=p, rank=rank, shuffle=True)
                    theirs.set_epoch(5)
                    assert list(theirs) == strided(order(length, 5), rank, p) and len(theirs) == -(-length // p)
    for p in (1, 2, 4, 8):
        padded, means, exact = accuracies([0] + 9 * [1], p)
        print(f"9 of 10 right, ranks: {p}, padded {padded:.1%}, mean of means {means:.1%}, sums and counts {exact:.1%}")
        assert exact == 0.9
    assert accuracies([0] + 9 * [1], 4)[0] == 10 / 12
    inputs, classes = batch()
    for p in range(1, 15):  # with 13 and 14 ranks, some have no sample, and add zeros
        shares = [shares_of_rank(NUM_SAMPLES, rank, p, max(NUM_SAMPLES, p))[0] for rank in range(p)]
        total = sum(gradient_of_sum(inputs[mine], classes[mine]) for mine in shares)
        assert torch.allclose(total / NUM_SAMPLES, answer())

# ## What to look at
#
# The gradient is the answer for every cut, also with fewer samples than ranks. A rank that has none in a step still
# takes part in its all-reduces, with zeros: see `replica.reduce_without_backward()`.
#
# ## The number that surprised
#
# 83.3%. The model is right about 9 of 10 samples. With 4 ranks, the padded evaluation counts samples 0 and 1 twice, and
# it is wrong about sample 0. So the score depends on the number of ranks, although the model does not.
#
# ## Exercises
#
# 1. Which samples are counted twice with 3 ranks? For which numbers of ranks is the padded result right, and does that
#    depend on *which* sample the model is wrong about?
# 2. `scripts/ddp exercise 08`: write the cut of a step into shares, and of a share into parts (see chapter 09).
#
# ## Next
#
# `09_accumulation.py`: the share of a rank may be larger than its memory.
