"""20 · Sums and their order

Two ranks train, then three: with the same program, samples and first weights. Why do they end with different weights?

    shards      0   1   2   3   4   5   6   7         of three ranks   rank 0   rank 1     rank 2
                └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘         has shards       0 1      2 3 4      5 6 7
                  └───┬───┘       └───┬───┘           adds up alone    (0,1)    (2,3) 4    5 (6,7)
                      └───────┬───────┘               the sums above these, all ranks make together
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, answer, as_threads, flat_gradient, net, share
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ddp
from ddp.collectives.shards import additions, additions_between, nodes_by_rank, shards_of_rank
from ddp.replica.broadcast import checksum

NUM_SHARDS, NUM_STEPS, RATE = 8, 20, 8.0

# ## An addition rounds
#
# A float64 has 53 binary digits, so an addition rounds. Two terms have one sum: a + b is b + a, bit by bit. Three terms
# have several, because an addition of floats is not associative. Two ranks add up the twelve samples as
# (0 … 5) + (6 … 11), and three ranks as (0 … 3) + (4 … 7) + (8 … 11). These are different sums.


def of_samples(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    """Returns the gradient of the sum of the losses of these samples, [67]."""
    model.zero_grad()
    F.cross_entropy(model(inputs), classes, reduction="sum").backward()
    return flat_gradient(model)


def by_ranks(comm: ddp.Communicator, model: nn.Module) -> Tensor:
    """Adds up the ranks' gradients, as all chapters before did."""
    return comm.all_reduce(of_samples(model, *share(comm.rank, comm.world_size)))


# ## A tree that does not know the ranks
#
# So cut the batch into eight *shards*, whatever the number of ranks, and add up their gradients as a fixed tree. The
# largest sums that a rank can make alone are its *nodes*. All ranks make the sums above, from a table of all nodes. An
# all-reduce fills the table: in a row, all ranks but one have zeros, and x + 0 rounds nothing.


def added_up(terms: Iterable[Tensor], pairs: Iterable[tuple[int, int]]) -> Tensor:
    """Adds the second term of each pair to the first one; returns term 0."""
    sums = list(terms)
    for into, other in pairs:
        sums[into] = sums[into] + sums[other]
    return sums[0]


def by_shards(comm: ddp.Communicator, model: nn.Module) -> Tensor:
    """Adds up the gradients of the shards, as the tree says."""
    nodes = [node for mine in nodes_by_rank(comm.world_size, NUM_SHARDS) for node in mine]
    table = torch.zeros(len(nodes), NUM_PARAMETERS, dtype=torch.float64)
    for row, node in zip(table, nodes, strict=True):
        if node.start in shards_of_rank(comm.rank, comm.world_size, NUM_SHARDS):
            terms = [of_samples(model, *share(shard, NUM_SHARDS)) for shard in node]
            row.copy_(added_up(terms, additions([range(shard, shard + 1) for shard in node], node)))
    comm.all_reduce(table)
    return added_up(table, additions_between(comm.world_size, NUM_SHARDS)) + 0.0  # makes −0.0 a zero without a sign


def by_library(comm: ddp.Communicator, model: ddp.BucketedDataParallel) -> Tensor:
    """Lets the library add them up, in buckets."""
    model.zero_grad()
    for shard in model.shards:
        with model.shard(shard):
            inputs, classes = share(shard, NUM_SHARDS)
            F.cross_entropy(model(inputs), classes, reduction="sum").backward()
    return flat_gradient(model) * NUM_SHARDS  # because the library divides by their number


def train(comm: ddp.Communicator, gradient: Callable[..., Tensor]) -> Tensor:
    """Returns the last weights."""
    model = ddp.BucketedDataParallel(net(), num_shards=NUM_SHARDS, comm=comm) if gradient is by_library else net()
    for _ in range(NUM_STEPS):
        mean, weights = gradient(comm, model) / NUM_SAMPLES, parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(weights.sub(mean, alpha=RATE), model.parameters())
    return parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    print(f"(0.1 + 0.2) + 0.3 = {(0.1 + 0.2) + 0.3}, 0.1 + (0.2 + 0.3) = {0.1 + (0.2 + 0.3)}")
    checksums = {}
    for how in (by_ranks, by_shards, by_library):
        found = [as_threads(partial(train, gradient=how), num_ranks)[0] for num_ranks in (1, 2, 3)]
        apart, checksums[how] = max((each - found[0]).abs().max().item() for each in found), list(map(checksum, found))
        print(f"{how.__name__:10} 1, 2, 3 ranks: weights {apart:5.0e} apart, checksums", *checksums[how])
    assert [len(set(each)) for each in checksums.values()] == [3, 1, 1]
    assert checksums[by_library] == checksums[by_shards]
    assert all(torch.allclose(each / NUM_SAMPLES, answer()) for each in as_threads(lambda c: by_shards(c, net()), 5))

# ## What to look at
#
# The checksums: three by ranks, and one by shards, by hand and by the library, which sends no table of zeros:
#
# ![Eight shards added up on three ranks, in two rounds](pictures/shards.svg)
#
# ## The number that surprised
#
# 2e-10. After one step weights are 4e-16 apart. 19 more, in which they jump back and forth, magnify that 500,000 times.
# In float32, 2²⁹ times as coarse, it would be about a tenth: two trainings that end elsewhere.
#
# ## Exercises
#
# 1. Add up the shards from left to right, in the place of the tree. Can bits stay, and what would ranks have to send?
# 2. Take four shards. Which checksums are equal then, and to which?
#
# ## Next
#
# `21_workers_come_and_go.py`: a worker dies, and the others go on. `docs/same-bits.md` has this one for your model.
