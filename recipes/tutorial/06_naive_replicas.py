"""06 · Naive replicas

An all-reduce adds up gradients. What else does it take until copies of a model on many ranks train as one?

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
# A *replica* is one rank's copy of a model. Its parameters stay equal to the others' for ever, for three reasons: they
# begin equal, they get equal gradients, and the optimizer's step depends on nothing else.


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
        nn.init.zeros_(model[0].weight)  # other first weights than rank 0: `begin_equal` has something to do
    if by_hand:
        begin_equal(comm, model)
    else:
        replica = ddp.NaiveDataParallel(model, comm=comm)
    optimizer, first_gradient = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), None
    for _ in range(10):
        optimizer.zero_grad()
        if by_hand:
            F.cross_entropy(model(inputs), classes, reduction="sum").backward()
            average_gradients(comm, model, len(inputs))
        else:
            loss_sum = F.cross_entropy(replica(inputs), classes, reduction="sum")
            replica.ride_along(ddp.Totals(loss_sum.detach(), len(inputs)))
            loss_of_all = F.cross_entropy(model(batch()[0]), batch()[1], reduction="sum").item()
            loss_sum.backward()
            assert isclose(replica.totals.loss_sum, loss_of_all)
            assert replica.totals[1:] == (NUM_SAMPLES, 0)  # samples of all ranks; votes to stop the run
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
        library_s = as_threads(lambda comm: train(comm, by_hand=False), p)
        for gradient, weights in (*ours, *library_s):
            assert torch.allclose(gradient, answer())
            assert torch.equal(weights, ours[0][1])  # on all ranks, and by hand as by the library
        distance = (ours[0][1] - alone).abs().max().item()
        print(f"{p} ranks: after ten steps all weights are equal, and {distance:.0e} from those of one process")
        assert distance < 1e-12

# ## What to look at
#
# `torch.equal` between ranks, `1e-12` to one process. Replicas are equal bit by bit, because each sum was added up once
# and given to all. One process adds up the same samples in another order, so its last digits differ. What matters for
# training is the first: two replicas that differ in one bit drift apart without a message.
#
# ## The number that surprised
#
# 5 all-reduces for 4 parameters: each has a message of its own, however small. A ResNet-50 has 161 parameters, two
# thirds of them with 2,048 numbers at most. Chapter 04 says what 161 times α costs.
#
# ## Exercises
#
# 1. Leave `begin_equal` out. After how many steps are the replicas equal, and what does `replica.verify_replicas()`
#    say?
# 2. `python -m ddp exercise 06`: write the averaging in `ddp/replica/naive.py`. It also has to work if a parameter has
#    no gradient on some ranks.
#
# ## Next
#
# `07_buckets.py`: fewer messages, and nobody waits for them.
