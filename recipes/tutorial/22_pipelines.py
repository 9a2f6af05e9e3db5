"""22 · Pipelines

So far each rank had the whole model. What if it does not fit, so that each rank has some of its layers only?

    rank 0   F0 F1 F2 F3                   B0 B1 B2 B3        F0: the forward of micro-batch 0 through a rank's layers
    rank 1      F0 F1 F2 F3             B0 B1 B2 B3           B0: its backward
    rank 2         F0 F1 F2 F3       B0 B1 B2 B3              between them, a rank's activations have to be kept
             └──── outputs travel ───▶
                                ◀─── their gradients ────┘
"""

import torch
from problem import NUM_SAMPLES, answer, as_threads, batch, net
from torch import Tensor
from torch.nn import functional as F

import ddp
from ddp.collectives.pipelines import PIPELINES, check, draw

STAGES, MICRO = 3, 3  # ranks; samples of a micro-batch
NUM_MICRO = NUM_SAMPLES // MICRO

# ## By hand
#
# A *stage* is a run of layers on one rank; stages in a row are a *pipeline*. Rank r computes with what rank r − 1
# sends, and sends the result, an *activation*, to rank r + 1. It must keep both until the backward, which needs them.
# Backward then goes the other way: rank r + 1 sends the gradient of the loss with respect to what it has received,
# autograd continues from there, and rank r sends the gradient with respect to what it has received itself. So each rank
# ends with the gradient of its own parameters, and nothing is averaged.


def by_hand(comm: ddp.Communicator) -> Tensor:
    """Returns the gradient of this rank's layer: all forwards, then all backwards."""
    stage, (inputs, classes) = net()[comm.rank], batch()
    before, after, is_last, held = comm.rank - 1, comm.rank + 1, comm.rank == STAGES - 1, []
    for samples, targets in zip(inputs.split(MICRO), classes.split(MICRO), strict=True):
        if comm.rank > 0:
            samples = comm.recv(torch.empty(MICRO, 8, dtype=torch.float64), before).requires_grad_()
        output = stage(samples)
        if is_last:
            output = F.cross_entropy(output, targets) / NUM_MICRO
        else:
            comm.send(output.detach(), after)
        held.append((samples, output))
    for samples, output in held:
        gradient = None if is_last else comm.recv(torch.empty_like(output), after)
        torch.autograd.backward(output, gradient)
        if comm.rank > 0:
            comm.send(samples.grad, before)
    return torch.cat([torch.zeros(0), *(parameter.grad.flatten() for parameter in stage.parameters())])


# ## The order is data
#
# This order is GPipe's. While rank 0 waits for the first gradient, it computes nothing: the empty places of the drawing
# are the *bubble*, (p − 1) ÷ (m + p − 1) of the time of p ranks for m micro-batches. No order has a smaller one, as
# long as a rank has one stage. But an order can keep less: if each rank begins a backward as soon as it can, it holds
# only as many activations as there are stages from it to the last. That is *1F1B*, one forward, one backward. In the
# library, both are generators like the ring's, with one more word, `Compute` (`ddp/collectives/pipelines.py`), and a
# checker proves that nobody waits forever. `ddp.Pipeline` runs them (`ddp/strategies/pipeline.py`).


def by_library(comm: ddp.Communicator, schedule: str) -> tuple[Tensor, int]:
    """Returns the gradient of this rank's layer, and how many activations it has held."""
    pipe = ddp.Pipeline([lambda number=number: net()[number] for number in range(STAGES)], schedule=schedule, comm=comm)
    inputs, classes = batch()
    given = inputs if comm.rank == 0 else None, classes if comm.rank == STAGES - 1 else None
    pipe.step(*given, F.cross_entropy, micro_size=MICRO)
    assert torch.allclose(pipe.gradient_norm(), answer().norm())  # of all stages together
    return torch.cat([torch.zeros(0), *(each.grad.flatten() for each in pipe.parameters())]), pipe.most_held[0]


if __name__ == "__main__":
    assert torch.allclose(torch.cat(as_threads(by_hand, STAGES)), answer())
    for name, order in PIPELINES.items():
        print(f"{name}\n{draw(order, STAGES, NUM_MICRO)}\n")
        proof = check(order, STAGES, NUM_MICRO)
        found = as_threads(lambda comm, name=name: by_library(comm, name), STAGES)
        assert torch.allclose(torch.cat([gradient for gradient, _ in found]), answer())
        assert [held for _, held in found] == list(proof.held)
        assert proof.bubble * (NUM_MICRO + STAGES - 1) == STAGES - 1
    assert check(PIPELINES["gpipe"], STAGES, 100).held == (100, 100, 100)
    assert check(PIPELINES["one_forward_one_backward"], STAGES, 100).held == (3, 2, 1)

# ## What to look at
#
# The two drawings: each has the same number of empty places, in other spots. In the second, look for the moment at
# which rank 0 sends F2 down while rank 1 sends B0 up. If each waited until the other has received, both would wait
# forever, as in chapter 01. So in 1F1B these two messages are one round, in which a rank sends and receives at once.
#
# ## The number that surprised
#
# 3, 2, 1 for 100 micro-batches, where GPipe holds 100 on each rank. More micro-batches make the bubble smaller, and
# with 1F1B they cost no memory. With 4 micro-batches on 3 ranks a third of the time is lost; with 100, 2 %.
#
# ## Exercises
#
# 1. How many numbers travel in a step here, and how many in chapter 02's ring of three? Which of the two grows with the
#    batch, and which with the model?
# 2. In `by_hand`, go through `held` from the last to the first. What becomes of the gradient, and of the first waits?
#
# ## Next
#
# `23_slices_of_a_layer.py`: what if a single layer is too large? `scripts/ddp draw 1f1b 4 --micro 8` draws more.
