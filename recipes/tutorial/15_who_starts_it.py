"""15 · Who starts it

torchrun, mpirun, Slurm and others start the same program many times. How does a process learn which rank it is, and
what happens to one that does not?

    torchrun    RANK=1                  WORLD_SIZE=2               ┐
    Open MPI    OMPI_COMM_WORLD_RANK=1  OMPI_COMM_WORLD_SIZE=2     │ rank 1 of 2, which meets rank 0
    MPICH       PMI_RANK=1              PMI_SIZE=2                 │ at an address and a port
    srun        SLURM_PROCID=1          SLURM_STEP_NUM_TASKS=2     ┘
    nobody                                                           rank 0 of 1, and so is the other one
"""

import os
from typing import NamedTuple

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, share
from torch import Tensor

import ddp

# ## Two numbers
#
# A launcher leaves rank and world size in the environment of each process, under names of its own.

VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def who(environment: dict[str, str]) -> tuple[int, int]:
    """Returns rank and world size, by the first launcher whose variables are there; without any, a world of one."""
    for rank, world_size in VARIABLES.values():
        if rank in environment and world_size in environment:
            return int(environment[rank]), int(environment[world_size])
    return 0, 1


# ## A place to meet
#
# Then the ranks need a *rendezvous*: rank 0 listens at an address and a port that all of them know, and there each one
# leaves word of how to reach it. torchrun tells both. Slurm tells the host of rank 0, and MPI neither; so a port is
# computed from what all ranks have in common: the number of the job, or the process that has started them.


ON_THIS_HOST = {
    "Open MPI": {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},  # all of them, so that no address is needed
    "MPICH": {"MPI_LOCALNRANKS": "2"},
    "srun": {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getppid()), "SLURM_STEP_ID": "0"},
}


class Worker(NamedTuple):
    """A process as its launcher has started it: which rank it is, and the gradient that it ends with."""

    rank: int
    num_ranks: int
    gradient: Tensor


def worker() -> Worker:
    """Joins the others, and computes the gradient as chapter 06 does: a share each, and an all-reduce."""
    comm = ddp.init(abort_s=20)
    assert who(dict(os.environ)) == (comm.rank, comm.world_size)
    gradient = gradient_of_sum(*share(comm.rank, comm.world_size)) / NUM_SAMPLES
    comm.all_reduce(gradient)
    ddp.shutdown()
    return Worker(comm.rank, comm.world_size, gradient)


def by_every_launcher() -> dict[str, Worker]:
    """Runs in each of two processes: puts the variables of one launcher in the place of another's, again and again."""
    rank, num_ranks = who(dict(os.environ))
    told = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_", "LOCAL_"))]
    workers = {"torchrun": worker()}
    for name in (*told, *VARIABLES["torchrun"]):
        os.environ.pop(name)
    for launcher in ("Open MPI", "MPICH", "srun"):
        numbers = zip(VARIABLES[launcher], map(str, (rank, num_ranks)), strict=True)
        variables = dict(numbers) | ON_THIS_HOST[launcher]
        os.environ |= variables
        workers[launcher] = worker()
        for name in variables:
            os.environ.pop(name)
    return workers | {"nobody": worker()}


if __name__ == "__main__":
    found = ddp.launch(by_every_launcher, workers=2)
    for launcher in found[0]:
        workers = [each[launcher] for each in found]
        print(f"{launcher:9}", " and ".join(f"rank {each.rank} of {each.num_ranks}" for each in workers))
        assert [each[:2] for each in workers] == ([(0, 1)] * 2 if launcher == "nobody" else [(0, 2), (1, 2)])
        assert all(torch.allclose(each.gradient, answer()) for each in workers)  # also where nobody has started them

# ## What to look at
#
# The last line. Two processes that are told nothing take themselves for rank 0 of 1, and each trains on all samples.
# `ddp/comm/meeting/place.py` has the whole table. It refuses a process that sees signs of others, such as a world size,
# and is not told its own rank.
#
# ## The number that surprised
#
# 0 errors. Each of the two has the right gradient, that of the whole batch. They take twice as long as one, and
# write into the same files; no loss curve shows it.
#
# ## Exercises
#
# 1. Give both processes the rank 0 of 2. What happens, and after how many seconds? What if only one comes?
# 2. Which ranks share a host? Find the variable that tells it for each launcher, and what it is needed for.
#
# ## Next
#
# `16_central_storage.py`: what the ranks of a host need only once. `docs/engines.md` has a program for each engine.
