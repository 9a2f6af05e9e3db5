"""21 · Workers come and go

In chapter 10 a worker died, and all started again from a checkpoint. Why throw the others' work away, too?

    rank 0   ●──●──●──●──●─╳ ●──●──●──●──●     rank 0     ● a step that is committed: all have its sum
    rank 1   ●──●──●──●──●─✗                   is killed  ╳ a step that breaks off, and changes nothing
    rank 2   ●──●──●──●──●─╳ ●──●──●──●──●     rank 1     the next one: the same step, on the same samples
             └─ generation 0 ┴ generation 1
"""

import logging
import os
import signal
import sys
import time
from itertools import pairwise

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, batch, flat_gradient, net
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ddp

BATCH, NUM_STEPS, DIES_IN, RATE, MOMENTUM = 6, 40, 17, 0.5, 0.9

# ## A survivor is a checkpoint
#
# Every rank holds all that a run needs to go on: the weights, the momentum, and the number of steps. So nothing has to
# come from a disk. Survivors may stand one step apart, because one of them can have had the whole sum before the worker
# died, and another one not. So all of them take the newest state that one of them has.


def newest(comm: ddp.Communicator, step: int, state: Tensor) -> int:
    """Gives every rank the state, [2, 67], of the rank that has made most steps; returns their number."""
    steps = [int(each) for each in comm.all_gather(torch.tensor([step]))]
    comm.broadcast(state, steps.index(max(steps)))
    return max(steps)


# ## A step is a transaction
#
# What a step needs follows from its number: which samples (chapter 08), and from the ranks that are there, whose share.
# Until the sum is complete it changes nothing, so that a step that breaks off can be made again, by fewer. The batch,
# and what its gradient is divided by, do not know how many ranks there are.


def sum_of_share(comm: ddp.Communicator, weights: Tensor, step: int) -> Tensor:
    """Returns the gradient of the sum of the losses of this rank's samples of a step, [67]."""
    model, (inputs, classes) = net(), batch()
    vector_to_parameters(weights, model.parameters())
    first = step * BATCH % NUM_SAMPLES
    mine = slice(first + comm.rank, first + BATCH, comm.world_size)
    F.cross_entropy(model(inputs[mine]), classes[mine], reduction="sum").backward()
    return flat_gradient(model)


def train(dies_in: int | None = None) -> tuple[Tensor, list[tuple[int, int, float]]]:
    """Returns the last weights, and of each step that this rank has committed: its number, the ranks, and when."""
    weights = parameters_to_vector(net().parameters()).detach()
    state, step, commits = torch.stack([weights, torch.zeros(NUM_PARAMETERS, dtype=torch.float64)]), 0, []
    while step < NUM_STEPS:
        comm = ddp.init()  # the ranks of the latest generation; in a program of your own, call it as late as here
        try:
            step = newest(comm, step, state)
            while step < NUM_STEPS:
                gradient = sum_of_share(comm, state[0], step)
                if step == dies_in and comm.rank == 1 and comm.generation == 0:
                    os.kill(os.getpid(), signal.SIGKILL)  # its share is computed, and the others wait for it
                comm.all_reduce(gradient)
                velocity = MOMENTUM * state[1] + gradient / BATCH
                state, step = torch.stack([state[0] - RATE * velocity, velocity]), step + 1  # the commit
                commits.append((step, comm.world_size, time.monotonic()))
        except ddp.PeerLost as error:
            print(f"rank {comm.rank} of {comm.world_size}, after step {step}: {str(error).partition(' on host')[0]}")
    return state[0], commits


# ## Who the ranks are
#
# The survivors need not vote: the launcher has started all workers, and the kernel tells it when one has ended. It
# writes the next list of members, a *generation*. Each worker reads it, gives up what it waits for, and finds in it
# which rank it is now (`ddp/comm/meeting/membership.py`).

if __name__ == "__main__":
    logging.getLogger("ddp").addHandler(logging.StreamHandler(sys.stdout))  # what the launcher says
    (undisturbed, _), *_ = ddp.launch(train, workers=1)
    survivors = ddp.launch(train, DIES_IN, workers=3, min_workers=2, restarts=0)
    for weights, commits in survivors:
        assert [step for step, _, _ in commits] == list(range(1, NUM_STEPS + 1))  # none is lost, none is made twice
        assert [ranks for _, ranks, _ in commits] == [3] * DIES_IN + [2] * (NUM_STEPS - DIES_IN)
        assert (weights - undisturbed).abs().max() < 1e-12
    apart = max((weights - undisturbed).abs().max().item() for weights, _ in survivors)
    seconds = [after[2] - before[2] for before, after in pairwise(survivors[0][1])]
    print(f"{len(survivors)} workers end, with weights {apart:.0e} from those of one worker that was not disturbed")
    print(f"the longest pause between two steps: {max(seconds):.2f} s, from step {1 + seconds.index(max(seconds))} on")

# ## What to look at
#
# The line of the launcher, and that of each survivor, which is another rank afterwards. Where a step ends may differ by
# one between survivors; then `newest` gives the later state to both. `ddp.fit` does all of this, with replicas, data,
# checkpoints and callbacks (`ddp/train/survive.py`). A spare, `spares=1`, would take rank 1's place at once.
#
# ## The number that surprised
#
# 0.3 s, in which nothing is started, loaded or read again: the survivors connect, and one sends the state. And 1e-15:
# the order of additions differs between three workers, two and one, and nothing else.
#
# ## Exercises
#
# 1. Let each rank have two samples of its own in each step, and divide by those of all: six, and then four. The run
#    goes on as well. What has changed, and which samples has nobody seen?
# 2. Let rank 1 die after `commits.append` in place of before the sum. Which steps can the survivors stand at then?
#
# ## Next
#
# `22_pipelines.py`: what if a model does not fit on one rank? `docs/elastic.md` has this chapter for your model.
