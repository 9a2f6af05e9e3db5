"""24 · A model in shares

Each replica holds all weights, p times the same. Can each of p ranks keep a p-th of them, and still compute with all?

    keeps    layer 0: forward    layer 2: forward    layer 2: backward    layer 0: backward    its step
    ▌        [▌▐]            ▌   [▌▐]            ▌   [▌▐]             ▌   [▌▐]             ▌   ▌   rank 0
     ▐       [▌▐]             ▐  [▌▐]             ▐  [▌▐]              ▐  [▌▐]              ▐   ▐  rank 1
             all-gather          all-gather          all-gather, reduce-scatter after each backward
"""

import torch
from problem import NUM_PARAMETERS, as_threads, net, share
from torch import Tensor, nn

import ddp
from ddp.strategies import FullySharded, Replicated

# ## By hand
#
# In a *fully sharded* training a rank keeps slices: of weights, gradients, momenta. It gathers one *unit* at a time,
# here a layer, whose weights are views of one tensor. Resizing that tensor's memory to nothing releases them. Resizing
# it back and filling it from all slices makes the views valid again, also those that autograd has saved for backward.


class Unit:
    """A layer whose weights are whole on this rank only while it computes with them."""

    def __init__(self, comm: ddp.Communicator, layer: nn.Module) -> None:
        self.comm, self.layer, self.whole = comm, layer, nn.utils.parameters_to_vector(layer.parameters()).detach()
        nn.utils.vector_to_parameters(self.whole, layer.parameters())  # makes them views of it
        self.bounds = [rank * len(self.whole) // comm.world_size for rank in range(comm.world_size + 1)]
        self.slice = slice(*self.bounds[comm.rank : comm.rank + 2])
        self.mine = self.whole[self.slice].clone()
        layer.register_forward_pre_hook(self.gather)
        layer.register_forward_hook(self.end_forward)
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce_if_ready)
        self.release()

    def gather(self, *_: object) -> None:
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole[self.slice] = self.mine
        self.comm.all_gather_(self.whole, self.bounds)

    def release(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def end_forward(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.release()
        output.register_hook(self.gather)  # autograd calls it when it begins with the layer's backward

    def reduce_if_ready(self, _: Tensor) -> None:
        gradients = [parameter.grad for parameter in self.layer.parameters()]
        if all(gradient is not None for gradient in gradients):
            self.release()
            flat = nn.utils.parameters_to_vector(gradients)
            self.comm.reduce_scatter_(flat, self.bounds, "mean")  # all ranks have equally many samples
            self.mine.grad = flat[self.slice].clone()
            self.layer.zero_grad()


def by_hand(comm: ddp.Communicator) -> tuple[Tensor, int, int]:
    """Returns the last weights; how many numbers this rank keeps, and how many a step gathers or reduces."""
    model, (inputs, classes) = net(), share(comm.rank, comm.world_size)
    units = [Unit(comm, model[0]), Unit(comm, model[2])]
    optimizer = torch.optim.SGD([unit.mine for unit in units], lr=0.5, momentum=0.9)  # of slices
    for _ in range(10):
        nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    num_sliced = sum(call["shape"][0] for call in comm.recent_calls()) // 10
    kept = [each["momentum_buffer"] for each in optimizer.state.values()]
    kept += [each for unit in units for each in (unit.whole, unit.mine, unit.mine.grad)]
    num_kept = sum(each.untyped_storage().nbytes() // 8 for each in kept)
    for unit in units:
        unit.gather()
    return nn.utils.parameters_to_vector(model.parameters()), num_kept, num_sliced


def by_library(comm: ddp.Communicator, kind: type = FullySharded) -> tuple[Tensor, list[dict]]:
    """Returns the last weights, and what the last step gathers and reduces."""
    model, (inputs, classes) = net(), share(comm.rank, comm.world_size)
    replica = kind.replica_of(model, comm=comm)
    strategy = kind(replica, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    for _ in range(10):
        num_calls = comm.num_calls
        strategy.optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), classes).backward()
        ddp.strategies.step(strategy)
    assert kind is Replicated or not any(each.isfinite().any() for each in model.parameters())  # the rest reads as NaN
    calls = [call for call in comm.recent_calls()[num_calls:] if call["operation"] != "all_reduce"]
    with replica.whole():
        return nn.utils.parameters_to_vector(model.parameters()), calls


if __name__ == "__main__":
    for p in (1, 2, 3, 4):
        found, shares, others = (as_threads(f, p) for f in (by_hand, by_library, lambda c: by_library(c, Replicated)))
        for weights, *_ in (*found, *shares):  # of two terms there is one sum
            assert torch.equal(weights, others[0][0]) if p < 3 else torch.allclose(weights, others[0][0], rtol=1e-12)
        assert sum(num_kept for _, num_kept, _ in found) == found[0][2] == 3 * NUM_PARAMETERS and len(shares[0][1]) == 4
        print(f"ranks: {p}; each keeps {[num_kept for _, num_kept, _ in found]} numbers; a step moves {found[0][2]}")
    print("the library's step:", ", ".join(f"{call['operation']} of {call['shape'][0]}" for call in shares[0][1]))

# ## What to look at
#
# All ranks together keep 201 numbers, as many as one replica. While a rank computes with a layer, it has that one, too.
#
# ## The number that surprised
#
# 3 · 67 in a step, where an all-reduce, which is a reduce-scatter and an all-gather, has 2 · 67. The library gathers
# nothing in this backward: layer 2, the last of the forward, has stayed, and the gradient of layer 0 needs no weights.
#
# ## Exercises
#
# 1. Release nothing after the forward. How many numbers travel in a step then, and what does a rank have at most?
# 2. Let rank 1 call the model once more than rank 0, to print a loss. What happens?
#
# ## Next
#
# That is all. `docs/strategies.md` has it for your model; `docs/reading.md` leads on, into the code.
