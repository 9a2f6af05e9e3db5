"""23 · Slices of a layer

A pipeline cuts a model between layers. Can ranks share a layer, so that each has a part of its matrix?

              first matrix, by outputs        second matrix, by inputs
    rank 0    x ─▶ [ W₁ rows of rank 0 ] ─ tanh ─▶ [ W₂ columns of rank 0 ] ─▶ a part of y ─┐
    rank 1    x ─▶ [ W₁ rows of rank 1 ] ─ tanh ─▶ [ W₂ columns of rank 1 ] ─▶ a part of y ─┼─ all-reduce ─▶ y
    rank 2    x ─▶ [ W₁ rows of rank 2 ] ─ tanh ─▶ [ W₂ columns of rank 2 ] ─▶ a part of y ─┘
"""

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, answer, as_threads, batch, net
from torch import Tensor, nn
from torch.nn import functional as F

import ddp

HIDDEN, CLASSES = 8, 3

# ## Two cuts, one sum
#
# *Tensor parallelism* gives each rank a slice of every matrix, and all ranks the same samples. Cut the first matrix by
# its outputs: each rank computes some of the hidden numbers, and nothing is sent. Tanh takes each number by itself, so
# it can begin at once. Cut the second matrix by its inputs, at the same places: each rank has just the hidden numbers
# that its slice needs, and gets a part of *every* output. The sum of the parts is the output: one all-reduce.


class Sliced(nn.Module):
    """A rank's slice of the network, whose outputs are those of the whole."""

    def __init__(self, comm: ddp.Communicator) -> None:
        super().__init__()
        first, _, second = net()
        self.comm = comm
        self.hidden = slice(comm.rank * HIDDEN // comm.world_size, (comm.rank + 1) * HIDDEN // comm.world_size)
        self.weight_in = nn.Parameter(first.weight[self.hidden].detach().clone())  # [slice, 4]
        self.bias_in = nn.Parameter(first.bias[self.hidden].detach().clone())  # [slice]
        self.weight_out = nn.Parameter(second.weight[:, self.hidden].detach().clone())  # [3, slice]
        self.bias_out = nn.Parameter(second.bias.detach().clone()) if comm.rank == 0 else None  # one adds it for all

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [samples, 3], the same on all ranks."""
        hidden = torch.tanh(F.linear(inputs, self.weight_in, self.bias_in))
        part = F.linear(hidden, self.weight_out, self.bias_out)
        return self.comm.all_reduce(part)  # in the graph: its backward is an all-reduce, too


# ## The gradient of a sum
#
# `comm.all_reduce` has a gradient (`ddp/comm/verbs.py`, note "gradients"): that of the *sum* of all ranks' losses. Here
# all ranks have the same outputs, and so the same loss. Their sum is p times the loss. So each rank takes a p-th part
# of it as its own, and then every slice gets the gradient that it has in the whole matrix. Layers below would get
# theirs, too: the parts of their gradient, one from each slice, are added up by the next all-reduce of the backward.


def gradient_of_slice(comm: ddp.Communicator) -> tuple[Tensor, int]:
    """Returns this rank's gradient, with zeros where others have their slices, [67]; and its number of parameters."""
    model, (inputs, classes) = Sliced(comm), batch()
    num_calls = comm.num_calls
    (F.cross_entropy(model(inputs), classes) / comm.world_size).backward()
    assert comm.num_calls - num_calls == 2  # all-reduces: one in the forward, one in the backward
    whole = [torch.zeros_like(parameter) for parameter in net().parameters()]
    whole[0][model.hidden], whole[1][model.hidden] = model.weight_in.grad, model.bias_in.grad
    whole[2][:, model.hidden] = model.weight_out.grad
    if model.bias_out is not None:
        whole[3].copy_(model.bias_out.grad)
    return torch.cat([each.flatten() for each in whole]), sum(each.numel() for each in model.parameters())


if __name__ == "__main__":
    for num_ranks in (1, 2, 3, 4, 8):
        found = as_threads(gradient_of_slice, num_ranks)
        distance = (sum(gradient for gradient, _ in found) - answer()).abs().max().item()
        counts = [count for _, count in found]
        print(f"ranks: {num_ranks}, parameters of each: {', '.join(map(str, counts))}; distance {distance:.0e}")
        assert sum(counts) == NUM_PARAMETERS  # each number is on one rank only
        assert distance < 1e-12
    sent = 2 * NUM_SAMPLES * CLASSES
    print(f"added up over the ranks in a step: {sent} numbers, where replicas add up {NUM_PARAMETERS}")

# ## What to look at
#
# `== NUM_PARAMETERS`: no rank has a whole matrix, neither its gradient nor the optimizer's state for it. And there are
# two sums in a step, where chapter 06 had five and chapter 07 hid them behind the backward. Here nothing can be hidden:
# the loss needs the first sum, and all of the backward the second one. So slices are for ranks that share a fast link.
#
# ## The number that surprised
#
# 72, whatever the number of parameters: what is added up are outputs, so it grows with the batch instead. In a large
# model, where a matrix has millions of numbers and a batch thousands of tokens, it is the other way round.
#
# ## Exercises
#
# 1. Cut both matrices by outputs. Which collective is needed after each of them, and how many numbers does it carry?
# 2. Give every rank the second bias, and leave the rest. What becomes of the outputs, and of its gradient?
#
# ## Next
#
# `24_a_model_in_shares.py`: can all ranks share all layers, and still each have its own samples?
