"""Every schedule by name, with its goal and the number of chunks into which it cuts the buffer.

    python -m ddp draw NAME N        python -m ddp check NAME N        both with --hosts 2,2 where a layout matters

                          chunks      rounds            sent by the busiest rank     canonical
    ring                  p           2(p−1)            2(p−1)/p·N                   to 2 ranks
    tree                  1           2⌈log₂ p⌉         ⌈log₂ p⌉·N                   always
    double_tree           2           2⌈log₂ p⌉         2N                           to 2 ranks
    butterfly             2^⌊log₂ p⌋  2 log₂ p (+2)     2(p−1)/p·N (+N)              powers of two, and 3, 6, 7, 12, …
    recursive_doubling    1           log₂ p (+2)       log₂ p·N (+N)                powers of two, and 3, 6, 7, 12, …
    circulant             p           2⌈log₂ p⌉         2(p−1)/p·N                   to 2 ranks
    all_to_all            p           2                 2(p−1)/p·N                   to 2 ranks
    master_worker         1           2                 (p−1)·N                      to 3 ranks
    round_robin           p           2p                2(p−1)/p·N                   to 2 ranks
    two_dimensional       p           2(R−1) + 2(C−1)   2(p−1)/p·N
    hierarchical          hosts       see there         a leader: see there

(+…) for a number of ranks that is no power of two. Which one is cheapest depends on α, β and the layout: see `cost.py`.

Read before: `grid.py`. Read next: `draw.py`.
"""

from __future__ import annotations

from functools import partial

from ddp.collectives import (
    all_to_all,
    butterfly,
    circulant,
    double_tree,
    grid,
    hierarchical,
    master_worker,
    ring,
    round_robin,
    tree,
)
from ddp.collectives.chunks import one_per_rank, whole
from ddp.collectives.placed import Hosts as Hosts
from ddp.collectives.schedule import Goal
from ddp.collectives.schedule import Schedule as Schedule

ALL_REDUCE = {
    "ring": Schedule(ring.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "tree": Schedule(tree.all_reduce, Goal.ALL_REDUCE, whole),
    "double_tree": Schedule(double_tree.all_reduce, Goal.ALL_REDUCE, double_tree.halves),
    "butterfly": Schedule(butterfly.all_reduce, Goal.ALL_REDUCE, butterfly.largest_power_of_two),
    "recursive_doubling": Schedule(butterfly.recursive_doubling, Goal.ALL_REDUCE, whole),
    "circulant": Schedule(circulant.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "all_to_all": Schedule(all_to_all.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "master_worker": Schedule(master_worker.all_reduce, Goal.ALL_REDUCE, whole),
    "round_robin": Schedule(round_robin.all_reduce, Goal.ALL_REDUCE, one_per_rank),
}
SCHEDULES = {
    **ALL_REDUCE,
    "ring_reduce_scatter": Schedule(ring.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank),
    "ring_all_gather": Schedule(ring.all_gather, Goal.ALL_GATHER, one_per_rank),
    "circulant_reduce_scatter": Schedule(circulant.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank),
    "circulant_all_gather": Schedule(circulant.all_gather, Goal.ALL_GATHER, one_per_rank),
    "all_to_all_reduce_scatter": Schedule(all_to_all.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank),
    "all_to_all_all_gather": Schedule(all_to_all.all_gather, Goal.ALL_GATHER, one_per_rank),
    "all_to_all_exchange": Schedule(all_to_all.exchange, Goal.ALL_TO_ALL, one_per_rank),
    "tree_broadcast": Schedule(tree.broadcast, Goal.BROADCAST, whole),
    "tree_reduce": Schedule(tree.reduce, Goal.REDUCE, whole),
    "tree_gather": Schedule(tree.gather, Goal.GATHER, one_per_rank),
    "tree_scatter": Schedule(tree.scatter, Goal.SCATTER, one_per_rank),
    "master_worker_reduce": Schedule(master_worker.reduce, Goal.REDUCE, whole),
    "master_worker_broadcast": Schedule(master_worker.broadcast, Goal.BROADCAST, whole),
}
BETWEEN_HOSTS = {
    "hierarchical": "ring",
    "hierarchical+butterfly": "butterfly",
    "hierarchical+recursive_doubling": "recursive_doubling",
    "hierarchical+tree": "tree",
}


def all_reduce_schedules(hosts: Hosts) -> dict[str, Schedule]:
    """Returns every all-reduce for ranks that stand on these hosts, by name.

    Those that need a layout are left out where they would be the same as a flat one: `two_dimensional` needs ranks that
    fill a grid, the hierarchical ones need several hosts, one of them with several ranks.

    Raises:
        ValueError: the hosts do not hold each rank 0, 1, … exactly once.
    """
    ranks = sorted(rank for host in hosts for rank in host)
    if not ranks or ranks != list(range(len(ranks))) or not all(hosts):
        raise ValueError(f"hosts={hosts}: give every host its ranks, each of 0, 1, 2, … exactly once, none empty")
    found = dict(ALL_REDUCE)
    rows = grid.rows_of(hosts)
    if len(rows) > 1:
        found["two_dimensional"] = Schedule(partial(grid.all_reduce, rows=rows), Goal.ALL_REDUCE, one_per_rank)
    if 1 < len(hosts) < len(ranks):
        found |= {name: _hierarchical(hosts, ALL_REDUCE[between]) for name, between in BETWEEN_HOSTS.items()}
    return found


def _hierarchical(hosts: Hosts, between: Schedule) -> Schedule:
    num_chunks = between.num_chunks(len(hosts))
    algorithm = partial(hierarchical.all_reduce, hosts=hosts, between=between)
    return Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: num_chunks)
