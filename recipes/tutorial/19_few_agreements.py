"""19 · Few agreements

Between two cities a message takes longer than many steps. What if workers train by themselves, and agree now and then?

    rank 0    │ ─ step ─ step ─ step ─ step ┐           ┌ step ─ …
    rank 1    │ ─ step ─ step ─ step ─ step ┼─ mean of ─┼ step ─ …      a round of four steps, and one all-reduce:
    rank 2    │ ─ step ─ step ─ step ─ step ┘  weights  └ step ─ …      of the differences to where the round began
"""

import torch
from problem import answer, as_threads, batch, net, share
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ddp

WORKERS, NUM_STEPS, RATE = 3, 96, 0.3

# ## A round
#
# Each rank keeps the *common weights*, with which the round began, and steps away from them on its own samples. At the
# end the ranks average how far each has come, and all go on from there. With one step a round it is what all chapters
# before did: the mean of the steps is the step along the mean gradient. With more it is not, because after the first
# step each rank computes its gradient elsewhere: *local SGD*.


def train(
    comm: ddp.Communicator, every: int, num_steps: int = NUM_STEPS, *, warm_up: int = 0, momentum: float = 0.0
) -> tuple[Tensor, int]:
    """Returns the common weights after all steps, and how often differences were sent.

    Args:
        every: steps of a round.
        warm_up: steps at the beginning that are rounds by themselves.
        momentum: of the common weights.
    """
    model, (inputs, classes), num_sent = net(), share(comm.rank, comm.world_size), 0
    common = parameters_to_vector(model.parameters()).detach()
    velocity = 0 * common
    for step in range(1, num_steps + 1):
        model.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
            if step <= warm_up or step % every == 0:
                num_sent += 1
                difference = common - parameters_to_vector(model.parameters())
                comm.all_reduce(difference, "mean")  # all ranks have as many samples; else they need weights
                velocity = momentum * velocity + difference
                common = common - (difference + momentum * velocity if momentum else difference)
                vector_to_parameters(common.clone(), model.parameters())
    return common, num_sent


def loss_at(weights: Tensor) -> float:
    """Returns the loss of the whole batch."""
    model, (inputs, classes) = net(), batch()
    vector_to_parameters(weights, model.parameters())
    return float(F.cross_entropy(model(inputs), classes).detach())


# ## The same by the library
#
# A strategy says what a step is (`ddp/strategies/strategy.py`). In that of local SGD each micro-batch is a step of the
# rank's own, with an optimizer of its own, and the end of the round is what the ranks agree on.


def by_library(comm: ddp.Communicator, every: int) -> Tensor:
    """Returns the common weights after all steps."""
    model, (inputs, classes) = net(), share(comm.rank, comm.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = ddp.strategies.LocalSteps(ddp.BucketedDataParallel(model, comm=comm), optimizer)
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        with strategy.micro_batch(is_last=step % every == 0):
            F.cross_entropy(strategy.model(inputs), classes).backward()
        if step % every == 0:
            ddp.strategies.step(strategy)
    return parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    start, losses = parameters_to_vector(net().parameters()).detach(), {}
    for weights, _ in as_threads(lambda comm: train(comm, 1, num_steps=1), WORKERS):
        assert torch.allclose((start - weights) / RATE, answer())  # a round of one step
    for every in (1, 4, 16, 48):
        found = as_threads(lambda comm, every=every: train(comm, every), WORKERS)
        assert all(torch.equal(weights, found[0][0]) for weights, _ in found)  # after a round all ranks are alike
        losses[every] = loss_at(found[0][0])
        more = losses[every] / losses[1] - 1
        print(f"steps of a round: {every:2}, sent {found[0][1]:2} times, loss {losses[every]:.4f}, {more:+.0%}")
        again = as_threads(lambda comm, every=every: by_library(comm, every), WORKERS)
        assert all(torch.allclose(weights, found[0][0]) for weights in again)
    for title, how in {"the first 24 synchronous": {"warm_up": 24}, "momentum 0.6": {"momentum": 0.6}}.items():
        weights, num_sent = as_threads(lambda comm, how=how: train(comm, 16, **how), WORKERS)[0]
        more = loss_at(weights) / losses[1] - 1
        print(f"steps of a round: 16, {title}: sent {num_sent:2} times, loss {loss_at(weights):.4f}, {more:+.0%}")
    assert losses[1] < losses[4] < losses[16] < losses[48]

# ## What to look at
#
# A sixteenth of the messages costs twice the loss here, because each rank sees the same four samples in every step, and
# goes where these lead. Ranks that draw from all samples drift apart far less: `docs/strategies.md` has the figures.
#
# ## The number that surprised
#
# Momentum ends below the synchronous steps. It does not mend the drift: its steps are 2.5 times as long in the end. To
# be fair, give the synchronous steps a momentum, too. In a long run, where rates fall, this is how DiLoCo trains.
#
# ## Exercises
#
# 1. Let each rank train on all twelve samples. Which of the losses stay apart, and why?
# 2. Average the ranks' weights in the place of their differences. What changes, and what does an encoding make of it?
#
# ## Next
#
# `20_sums_and_their_order.py`: why bits depend on how many train. `scripts/ddp train strategy=local_sgd` trains so.
