"""05 · Shared memory: why nothing beats not sending

Ranks of one host have the same memory chips. Why should they send each other anything?

              rank 0's tensor           rank 1's tensor           rank 2's tensor
            ┌───────┬───────┬───────┐ ┌───────┬───────┬───────┐ ┌───────┬───────┬───────┐
            │slice 0│slice 1│slice 2│ │slice 0│slice 1│slice 2│ │slice 0│slice 1│slice 2│
            └───┬───┴───────┴───────┘ └───┬───┴───────┴───────┘ └───┬───┴───────┴───────┘
                └───────── + ─────────────┴───────── + ─────────────┘
    rank 0      reads slice 0 of all three, adds, and writes the sum to slice 0 of all three
    rank 1      does the same with slice 1, and rank 2 with slice 2, all at the same time, without a message
"""

import os
import tempfile
from pathlib import Path

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, answer, gradient_of_sum, seconds_of, share

import ddp

P, LARGE = 3, 1 << 20  # ranks; numbers of the large tensor

# ## One tensor, seen by all
#
# A file can be mapped into the memory of several processes. Whatever one writes there, the others see, without a copy.
# Each rank makes such a file for its tensor and maps those of its neighbours.


def everyones(comm: ddp.Communicator, folder: Path, numel: int) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, by rank, each [numel]; this rank's own is among them."""
    mine = folder / f"{numel}-{comm.rank}"
    mine.touch()
    os.truncate(mine, 8 * numel)
    comm.barrier()  # until all files are there
    files = [folder / f"{numel}-{rank}" for rank in range(comm.world_size)]
    return [torch.from_file(str(file), shared=True, size=numel, dtype=torch.float64) for file in files]


# ## The all-reduce
#
# Two barriers are all the communication there is. Before the first, a neighbour may still be writing its numbers.
# Before the second, it may still be reading ours. In between, every element has one owner, who adds, so no two ranks
# ever write to the same place.


def all_reduce(comm: ddp.Communicator, tensors: list[torch.Tensor]) -> None:
    """Makes every rank's tensor the sum of all, in place."""
    rank, p, numel = comm.rank, comm.world_size, len(tensors[0])
    mine = slice(rank * numel // p, (rank + 1) * numel // p)
    comm.barrier()
    total = (tensors[0][mine] + tensors[1][mine]) + tensors[2][mine]  # ((0, 1), 2): nearest neighbours first
    for tensor in tensors:
        tensor[mine] = total
    comm.barrier()


def on_each_rank(folder: Path) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns the gradient, and the seconds of every way for a large tensor; compares what they add up."""
    comm = ddp.init()
    gradients = everyones(comm, folder, NUM_PARAMETERS)
    gradients[comm.rank].copy_(gradient_of_sum(*share(comm.rank, P)))
    all_reduce(comm, gradients)

    numbers = torch.randn(LARGE, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    large, ordinary, allocated = everyones(comm, folder, LARGE), numbers.clone(), comm.allocate(LARGE, torch.float64)
    way = "shared_memory" if "shared_memory" in comm.ways() else "tree"  # without shared memory, the library sends
    for tensor in (large[comm.rank], allocated):
        tensor.copy_(numbers)
    all_reduce(comm, large)
    for tensor in (ordinary, allocated):
        comm.all_reduce(tensor, algorithm=way)
        assert torch.equal(tensor, large[comm.rank])  # bit by bit what we have added by hand
    return gradients[comm.rank] / NUM_SAMPLES, {
        "by hand": seconds_of(comm, lambda: all_reduce(comm, large)),
        "library, memory of all": seconds_of(comm, lambda: comm.all_reduce(allocated, algorithm=way)),
        "library, ordinary memory": seconds_of(comm, lambda: comm.all_reduce(ordinary, algorithm=way)),
        "library, ring of messages": seconds_of(comm, lambda: comm.all_reduce(ordinary, algorithm="ring")),
        "memory is shared": float(way == "shared_memory"),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = ddp.launch(on_each_rank, Path(folder), workers=P)
    for gradient, _ in results:
        assert torch.allclose(gradient, answer()) and torch.equal(gradient, results[0][0])
    times = results[0][1]
    is_shared = bool(times.pop("memory is shared"))
    for name, seconds in times.items():
        print(f"8 MB, {P} ranks, {name:25} {1e3 * seconds:6.2f} ms")
    if is_shared:
        assert times["library, memory of all"] < times["library, ring of messages"]
    else:
        print("here the library cannot share memory between ranks (that needs Linux), so it has added up by messages")

# ## What to look at
#
# The results are compared by `torch.equal`: the library adds in the same order as `all_reduce` above, nearest
# neighbours first, like the tree of chapter 03. So a sum has the same bits by memory and by tree, wherever the slices
# begin. An ordinary tensor costs two more copies, into memory that all ranks see and back. So the library's gradients
# live there from the start (chapter 07).
#
# ## The number that surprised
#
# The rows by hand and by the library: a dozen lines are several times as fast as a ring, which sends as little as
# messages can. A ring's bytes are copied into the kernel and out of it, and each of its rounds wakes a process up.
#
# ## Exercises
#
# 1. Take away the first barrier, and run it some times; then the second one instead. Which ranks get which wrong sums?
# 2. Let rank 0 add everything, instead of a slice each. How much slower is it with 2, 3 and 4 ranks?
#
# ## Next
#
# `06_naive_replicas.py`: with an all-reduce in hand, a model can be trained.
