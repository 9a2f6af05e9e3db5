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
# Shuffling needs no message. All ranks draw the same permutation from the same seed, and each takes its part. The epoch
# is a part of the seed; a sampler that is not told of a new epoch repeats the order of the last one.


def order(length: int, epoch: int, *, seed: int = 0) -> list[int]:
    """Returns the samples in the order of an epoch, the same on every rank."""
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
# Padding keeps ranks in step, and in training a sample too many does little harm. In an evaluation it changes the
# result, and with the number of ranks. Means of means do, too, if ranks have unequal shares. Sums and counts do not.


def accuracies(is_right: list[int], p: int) -> tuple[float, float, float]:
    """Returns the accuracy over padded shares, as a mean of the ranks' means, and from sums and counts."""
    length = len(is_right)
    padded = [is_right[index] for rank in range(p) for index in strided(list(range(length)), rank, p)]
    sums = [sum(is_right[index] for index in contiguous(length, rank, p)) for rank in range(p)]
    counts = [len(contiguous(length, rank, p)) for rank in range(p)]
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    return sum(padded) / len(padded), sum(means) / p, sum(sums) / sum(counts)


# ## Training in steps
#
# `ddp.TrainSampler` cuts each epoch into steps of a *global batch*, the samples of all ranks together, and each step
# into shares. Nothing is padded or dropped: the last step of an epoch is smaller. A step has the same samples at every
# number of ranks, so a run may go on with more or fewer of them.


def samples_of_steps(length: int, p: int, global_batch: int) -> list[list[int]]:
    """Returns the samples of each step of an epoch, of all ranks together."""
    samplers = [ddp.TrainSampler(length, global_batch=global_batch, rank=r, world_size=p, seed=3) for r in range(p)]
    plans = zip(*(sampler.plans() for sampler in samplers), strict=True)
    shares = [[[i for micro in plan.micros for i in micro.indices] for plan in step] for step in plans]
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in shares)
    return [list(chain(*step)) for step in shares]


if __name__ == "__main__":
    for length in (1, 7, 10, 12, 64):
        for p in range(1, 9):
            whole, steps = list(range(length)), samples_of_steps(length, 1, max(8, p))
            assert sorted(chain(*steps)) == whole and samples_of_steps(length, p, max(8, p)) == steps
            assert list(chain(*(contiguous(length, rank, p) for rank in range(p)))) == whole
            for rank in range(p):
                assert ddp.EvaluationSampler(length, num_replicas=p, rank=rank).share == contiguous(length, rank, p)
                for sampler in (DistributedSampler, ddp.DistributedSampler):
                    theirs = sampler(whole, num_replicas=p, rank=rank, shuffle=True)
                    theirs.set_epoch(5)
                    assert list(theirs) == strided(order(length, 5), rank, p) and len(theirs) == -(-length // p)

    for p in (1, 2, 4, 8):
        padded, means, exact = accuracies([0] + 9 * [1], p)
        print(f"9 of 10 right, {p} ranks: padded {padded:.1%}, means of means {means:.1%}, sums and counts {exact:.1%}")
        assert exact == 0.9
    assert accuracies([0] + 9 * [1], 4)[0] == 10 / 12

    inputs, classes = batch()
    for p in range(1, 9):
        sampler_s = [ddp.TrainSampler(NUM_SAMPLES, global_batch=NUM_SAMPLES, rank=r, world_size=p) for r in range(p)]
        indices = [[i for micro in next(sampler.plans()).micros for i in micro.indices] for sampler in sampler_s]
        total = sum(gradient_of_sum(inputs[mine], classes[mine]) for mine in indices)
        assert torch.allclose(total / NUM_SAMPLES, answer())

# ## What to look at
#
# Every assertion holds for any number of samples and ranks, also for fewer samples than ranks: then some ranks have
# none, and take part in the all-reduce with zeros. And the gradient is still the answer, for every cut.
#
# ## The number that surprised
#
# 83.3%. The model is right about 9 of 10 samples. On 4 ranks the padded evaluation counts sample 0 twice, on which it
# is wrong, and so the same model has another accuracy at every number of ranks.
#
# ## Exercises
#
# 1. Which samples are counted twice with 3 ranks? For which numbers of ranks is the padded result right by luck?
# 2. `python -m ddp exercise 08`: write the cut of a step into shares, in `ddp/data/sampler.py`.
#
# ## Next
#
# `09_accumulation.py`: the share of a rank may be larger than its memory.
