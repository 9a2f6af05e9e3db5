"""06 · Naive replicas

An all-reduce adds up gradients. What else is needed for copies of a model on many ranks to train as one?

    rank 0   weights of rank 0 ─▶ forward, backward on its share ─┐                ┌─▶ optimizer step ─▶ equal weights
    rank 1   weights of rank 0 ─▶ forward, backward on its share ─┼─▶ all-reduce ──┼─▶ optimizer step ─▶ equal weights
    rank 2   weights of rank 0 ─▶ forward, backward on its share ─┘   ÷ samples    └─▶ optimizer step ─▶ equal weights
             └─ broadcast, once
"""

from math import isclose

import torch
from problem import NUM_SAMPLES, answer, as_threads, batch, flat_gradient, net, share
from torch import Tensor, nn
from torch.nn import functional as F

import ddp

# ## By hand
#
# A *replica* is one rank's copy of a model. Its parameters stay equal to the others' forever, for three reasons: they
# begin equal, they get equal gradients, and the optimizer's step depends on nothing else. To begin equal takes a
# *broadcast*, the collective that gives every rank the tensor of one, the root.


def begin_equal(comm: ddp.Communicator, model: nn.Module) -> None:
    """Gives every rank the weights of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.detach(), root=0)


def average_gradients(comm: ddp.Communicator, model: nn.Module, num_samples: int) -> None:
    """Makes every gradient the sum over all ranks, divided by the number of samples of all ranks."""
    count = comm.all_reduce(torch.tensor([num_samples]))
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)
        parameter.grad /= count


# ## The same in the library
#
# `ddp.NaiveDataParallel` (`ddp/replica/naive.py`) does both: it broadcasts when it is made, and averages when backward
# ends. `ride_along` tells it the loss and the number of samples of this rank; they travel with the gradients, which are
# then divided by the number of all samples. Without it, gradients are divided by the number of ranks, as in torch.


def train(comm: ddp.Communicator, *, by_hand: bool) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the first step, and the weights after ten."""
    model, (inputs, classes) = net(), share(comm.rank, comm.world_size)
    if comm.rank > 0:
        nn.init.zeros_(model[0].weight)  # first weights that differ from rank 0's
    if by_hand:
        begin_equal(comm, model)
    else:
        replica = ddp.NaiveDataParallel(model, comm=comm)
    optimizer, first_gradient = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), None
    for _ in range(10):
        optimizer.zero_grad()
        if by_hand:
            F.cross_entropy(model(inputs), classes, reduction="sum").backward()
            num_calls = comm.num_calls
            average_gradients(comm, model, len(inputs))
            assert comm.num_calls - num_calls == 5  # all-reduces
        else:
            loss_sum = F.cross_entropy(replica(inputs), classes, reduction="sum")
            replica.ride_along(ddp.Totals(loss_sum.detach(), len(inputs)))
            loss_sum.backward()  # adds up the totals, too:
            loss_of_all = F.cross_entropy(model(batch()[0]), batch()[1], reduction="sum").item()
            assert isclose(replica.totals.loss_sum, loss_of_all) and replica.totals.num_items == NUM_SAMPLES
        first_gradient = flat_gradient(model) if first_gradient is None else first_gradient
        optimizer.step()
    return first_gradient, nn.utils.parameters_to_vector(model.parameters()).detach()


def train_alone() -> Tensor:
    """Returns the weights after ten steps of one process on the whole batch."""
    model, (inputs, classes) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    alone = train_alone()
    for p in (1, 2, 3, 5, 8):
        ours = as_threads(lambda comm: train(comm, by_hand=True), p)
        by_library = as_threads(lambda comm: train(comm, by_hand=False), p)
        for gradient, weights in (*ours, *by_library):
            assert torch.allclose(gradient, answer())
            assert torch.equal(weights, ours[0][1])  # on all ranks, and by hand as by the library
        distance = (ours[0][1] - alone).abs().max().item()
        print(f"ranks: {p}, after ten steps all weights are equal, and {distance:.0e} from those of one process")
        assert distance < 1e-12

# ## What to look at
#
# `torch.equal` between ranks, and `1e-12` as the distance from one process. Replicas are equal bit by bit, because each
# sum was computed once and given to all. One process adds up the same samples in a different order, so its last digits
# differ. What matters for training is the first. All ranks make the same step, so nothing corrects a difference between
# two replicas: from then on they average gradients of two models, and no error says so.
#
# ## The number that surprised
#
# 5 all-reduces: one for the count, and one for each of the 4 parameters, however small. A ResNet-50 has 161 parameters,
# two thirds of them with 2,048 numbers at most. By a ring, each all-reduce costs 2(p − 1) times α (chapter 04).
#
# ## Exercises
#
# 1. Leave `begin_equal` out. How far apart are the weights of two ranks after 1, 10 and 300 steps, and why does that
#    never change? What does `replica.verify_replicas()` say if you change one weight in the library's branch?
# 2. `scripts/ddp exercise 06`: write the averaging of `ddp/replica/naive.py`. It also has to work if a parameter has no
#    gradient on some ranks.
#
# ## Next
#
# `07_buckets.py`: fewer messages, and nobody waits for them.
