"""05 · Shared memory: why nothing beats not sending

Ranks on one host share its memory. Why should they send each other anything?

              rank 0's tensor           rank 1's tensor           rank 2's tensor
            ┌───────┬───────┬───────┐ ┌───────┬───────┬───────┐ ┌───────┬───────┬───────┐
            │slice 0│slice 1│slice 2│ │slice 0│slice 1│slice 2│ │slice 0│slice 1│slice 2│
            └───┬───┴───────┴───────┘ └───┬───┴───────┴───────┘ └───┬───┴───────┴───────┘
                └───────── + ─────────────┴───────── + ─────────────┘
    rank 0      reads slice 0 of all three, adds, and writes the sum to slice 0 of all three
    rank 1      does the same with slice 1, and rank 2 with slice 2, all at the same time, without a message
"""

import tempfile
import time
from pathlib import Path

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, answer, gradient_of_sum, seconds_of, share

import ddp

P, LARGE = 3, 1 << 20  # ranks; numbers of the large tensor

# ## One tensor, seen by all
#
# A file can be mapped into the memory of several processes. Whatever one writes there, the others see, without a copy.
# Each rank makes such a file for its tensor, and maps the files of all. In between they meet in a *barrier*, which
# returns on every rank once all ranks have called it.


def everyones(comm: ddp.Communicator, folder: Path, numel: int) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, by rank, each [numel]; this rank's own is among them."""
    (folder / f"{numel}-{comm.rank}").write_bytes(bytes(8 * numel))
    comm.barrier()  # until all files are there
    files = [folder / f"{numel}-{rank}" for rank in range(comm.world_size)]
    return [torch.from_file(str(file), shared=True, size=numel, dtype=torch.float64) for file in files]


# ## The all-reduce
#
# Two barriers are all the communication there is. Before the first, another rank may still be writing its numbers;
# before the second, it may still be writing its *slice* of the sum to ours. In between, each slice belongs to one rank,
# so no two ranks ever write to the same place.


def all_reduce(comm: ddp.Communicator, tensors: list[torch.Tensor]) -> None:
    """Makes every rank's tensor the sum of all, in place."""
    numel = len(tensors[0])
    mine = slice(comm.rank * numel // P, (comm.rank + 1) * numel // P)
    comm.barrier()
    total = (tensors[0][mine] + tensors[1][mine]) + tensors[2][mine]  # ((0, 1), 2): nearest neighbours first
    for tensor in tensors:
        tensor[mine] = total
    comm.barrier()


def on_each_rank(folder: Path) -> tuple[torch.Tensor, bool, dict[str, float]]:
    """Returns the gradient, True if the library shares memory here, and seconds for a large tensor, way by way."""
    comm = ddp.init()
    gradients = everyones(comm, folder, NUM_PARAMETERS)
    gradients[comm.rank].copy_(gradient_of_sum(*share(comm.rank, P)))
    all_reduce(comm, gradients)

    numbers = torch.randn(LARGE, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    large, ordinary = everyones(comm, folder, LARGE), torch.empty_like(numbers)
    allocated = comm.allocate(LARGE, torch.float64)  # memory that all ranks of this host see, from the library
    way = "shared_memory" if "shared_memory" in comm.plan.algorithms() else "tree"  # what an all-reduce may take here
    sums = comm.all_reduce(numbers.clone(), algorithm="tree")  # by messages: the bits that all ways must have
    for attempt in range(20):
        pause_s = 0.002 if comm.rank == attempt % P else 0.0  # it must not matter who is late
        time.sleep(pause_s)
        large[comm.rank].copy_(numbers)
        all_reduce(comm, large)
        assert torch.equal(large[comm.rank], sums)
        for tensor in (ordinary, allocated):
            time.sleep(pause_s)
            assert torch.equal(comm.all_reduce(tensor.copy_(numbers), algorithm=way), sums)
    return gradients[comm.rank] / NUM_SAMPLES, way == "shared_memory", {
        "by hand": seconds_of(comm, lambda: all_reduce(comm, large)),
        "library, memory of all": seconds_of(comm, lambda: comm.all_reduce(allocated, algorithm=way)),
        "library, ordinary memory": seconds_of(comm, lambda: comm.all_reduce(ordinary, algorithm=way)),
        "library, ring of messages": seconds_of(comm, lambda: comm.all_reduce(ordinary, algorithm="ring")),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = ddp.launch(on_each_rank, Path(folder), workers=P)
    for gradient, *_ in results:
        assert torch.allclose(gradient, answer()) and torch.equal(gradient, results[0][0])
    _, is_shared, times = results[0]
    for name, seconds in times.items():
        print(f"8 MB, {P} ranks, {name:25} {1e3 * seconds:6.2f} ms")
    if is_shared:
        assert max(times["by hand"], times["library, memory of all"]) < times["library, ring of messages"]
    else:
        print("here the library cannot share memory between ranks (that needs Linux), so it has added up by messages")

# ## What to look at
#
# The results are compared by `torch.equal`: the library adds in the same order as `all_reduce` above, nearest
# neighbours first, like the tree of chapter 03. An ordinary tensor costs two more copies, into memory that all ranks
# see and back, so the library keeps gradients in such memory from the start.
#
# ## The number that surprised
#
# The first row: a dozen lines of Python are several times as fast as the ring, although no all-reduce by messages sends
# less. A ring's bytes are copied into the kernel and out of it, and each of its rounds wakes a process up.
#
# ## Exercises
#
# 1. Take away the first barrier, then the second one instead. Before the assertion that fails, print which slices of
#    `large[comm.rank]` are wrong on which rank. Why these?
# 2. Let rank 0 add everything, while the others wait at the second barrier. Is it slower on your machine? What limits
#    it there, the cores or the speed of memory?
#
# ## Next
#
# `06_naive_replicas.py`: with an all-reduce in hand, a model can be trained.
