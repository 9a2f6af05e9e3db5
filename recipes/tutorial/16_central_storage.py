"""16 · Central storage: a step against the memory's speed

All replicas have the same weights and the same state of the optimizer. Why should one host hold them twice?

    replicas           rank 0: weights, moments        rank 1: weights, moments      each updates all of its own
    central storage          ┌──────────────────────────┬──────────────────────────┐
                             │ weights, moments: rank 0 │ weights, moments: rank 1 │ once for the host
                             └──────────────────────────┴──────────────────────────┘
    backward ─▶ barrier ─▶ each rank adds up its slice of the gradients, and updates it ─▶ barrier ─▶ forward
"""

from collections.abc import Callable

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, QUICK, answer, gradient_of_sum, net, seconds_of, share
from torch import Tensor
from torch.optim import adamw

import ddp
from ddp.strategies.host_store import shared_by_host  # chapter 05's files, as one memory for all ranks of a host

P, LARGE, BLOCK = 2, 1 << 20 if QUICK else 1 << 23, 1 << 18  # ranks; numbers of the large tensors, and of a block

# ## The update
#
# Each line of `by_hand` reads two or three tensors from memory and writes one: some twenty numbers pass for every
# weight. Only seven have to, because a weight, its two moments and its gradient are read, and the first three are
# written. So torch has a *fused* kernel, which does all of it to one number after another.


def by_hand(weights: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: int = 1) -> None:
    """Makes step number `step` in place, as torch.optim.AdamW does with its defaults."""
    first.lerp_(gradient, 0.1)
    second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    length = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
    weights.mul_(1 - 1e-3 * 0.01).addcdiv_(first, length, value=-1e-3 / (1 - 0.9**step))


def fused(weights: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: int = 1) -> None:
    """Makes the same step in one pass over the numbers."""
    how = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    tensors = [weights], [gradient], [first], [second], [], [torch.tensor(step - 1.0)]
    adamw.adamw(*tensors, fused=True, maximize=False, **how)


# ## One memory, two barriers
#
# Between the barriers each number of the weights has one writer and no reader. Before the first one, another rank may
# still be in its backward, which reads them all; after the second one, they are all new. A slice is updated in
# *blocks*: the sum of a block's gradients is still in the processor's cache when the update reads it.


def storage(comm: ddp.Communicator, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns the host's memory, zeros [3 + ranks, numel]: weights, two moments, and each rank's gradients."""
    return shared_by_host(comm, (3 + P) * numel * dtype.itemsize).view(dtype).view(3 + P, numel)


def update(comm: ddp.Communicator, rows: Tensor, rank: int, num_ranks: int, how: Callable[..., None]) -> None:
    """Updates slice `rank` of `num_ranks`, from the sum of all ranks' gradients."""
    start, stop = (each * rows.shape[1] // num_ranks for each in (rank, rank + 1))
    comm.barrier()
    for begin in range(start, stop, BLOCK):
        weights, first, second, *gradients = rows[:, begin : min(begin + BLOCK, stop)]
        how(weights, first, second, gradients[0] + gradients[1])
    comm.barrier()


def on_each_rank() -> tuple[list[Tensor], dict[str, tuple[float, int]]]:
    """Returns the small net's weights after a step; and of large tensors seconds and bytes, way by way."""
    comm, found = ddp.init(), []
    own, large = torch.zeros(3 + P, LARGE), storage(comm, LARGE, torch.float32)
    own[3:], large[3 + comm.rank] = 1e-3, 1e-3
    size, least = 4 * LARGE, 6 + P  # bytes of a tensor; tensors that an update reads or writes at least
    ways = {"a plain copy": (seconds_of(comm, lambda: own[0].copy_(own[1])), P * 2 * size)}
    for how in (by_hand, fused):
        small = storage(comm, NUM_PARAMETERS, torch.float64)
        if comm.rank == 0:  # one rank writes them, and all have them
            small[0] = torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
        small[3 + comm.rank] = gradient_of_sum(*share(comm.rank, P)) / NUM_SAMPLES
        update(comm, small, comm.rank, P, how)
        found.append(small[0].clone())
        everything = seconds_of(comm, lambda how=how: update(comm, own, 0, 1, how))
        its_slice = seconds_of(comm, lambda how=how: update(comm, large, comm.rank, P, how))
        ways |= {f"each rank everything, {how.__name__}": (everything, P * least * size)}
        ways |= {f"each rank a slice, {how.__name__}": (its_slice, least * size)}
    return found, ways


if __name__ == "__main__":
    results = ddp.launch(on_each_rank, workers=P)
    for name, (seconds, num_bytes) in results[0][1].items():
        print(f"{name:30} {1e3 * seconds:6.1f} ms, {num_bytes / seconds / 1e9:5.1f} GB/s")
    alone = net()  # one process, the whole batch, and torch's own optimizer
    for parameter, gradient in zip(alone.parameters(), answer().split([32, 8, 24, 3]), strict=True):
        parameter.grad = gradient.view_as(parameter)
    torch.optim.AdamW(alone.parameters()).step()
    expected = torch.cat([parameter.flatten() for parameter in alone.parameters()])
    assert all(torch.allclose(weights, expected, rtol=1e-12) for found, _ in results for weights in found)

# ## What to look at
#
# The bytes per second beside those of a copy. An update that moves no more bytes than it must is as fast as memory is.
# `ddp/strategies/central_storage.py` is this with six optimizers, on several hosts, and with clipping.
#
# ## The number that surprised
#
# The last row: AdamW's root and divisions cost nothing, because memory is slower than they are. By hand the same
# arithmetic takes twice as long. Nothing but moving fewer bytes helps, and a slice each is half of the bytes.
#
# ## Exercises
#
# 1. Take away the first barrier, then the second one instead. Which ranks may see what that is wrong?
# 2. Set `BLOCK` to 1 << 12, and to `LARGE`. Which rows change, and why?
#
# ## Next
#
# `17_what_a_second_worker_buys.py`: how to know it before there is one.
