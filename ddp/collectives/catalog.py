"""Every schedule by name, with its goal and the number of chunks into which it cuts the buffer.

    python -m ddp draw NAME N        python -m ddp check NAME N        both with --hosts 2,2 where a layout matters

                          chunks      rounds            sent by the busiest rank     canonical
    naive_all_to_all      1           1                 (p−1)·N                      to 3 ranks
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
    hierarchical          see placed.py
    slice_owners          p           2                 see all_to_all.py           always, over shards

(+…) if the number of ranks is not a power of two. The cheapest one depends on α, β and the layout: see `cost.py`.

`slice_owners` adds up the shards of a batch, while the others add up ranks. A rank's buffers are then sums of its own
shards, so it cannot be an ordinary all-reduce, and "auto" does not take it.

`register` adds a user's all-reduce. It is offered by name and to "auto", for every number of ranks for which it is
proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import ddp.collectives.all_to_all as all_to_all
import ddp.collectives.butterfly as butterfly
import ddp.collectives.circulant as circulant
import ddp.collectives.master_worker as master_worker
import ddp.collectives.placed as placed
import ddp.collectives.ring as ring
import ddp.collectives.tree as tree
from ddp.collectives.placed import Hosts as Hosts
from ddp.collectives.schedule import Algorithm, Goal, Recv, Round, ScheduleError, Send, one_chunk, one_per_rank
from ddp.collectives.schedule import Schedule as Schedule
from ddp.errors import ConfigError

ALL_REDUCE = {  # "auto" takes the first of equally fast ones
    "ring": Schedule(ring.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "tree": Schedule(tree.all_reduce, Goal.ALL_REDUCE, one_chunk),
    "double_tree": Schedule(tree.double_all_reduce, Goal.ALL_REDUCE, tree.halves),
    "butterfly": Schedule(butterfly.all_reduce, Goal.ALL_REDUCE, butterfly.largest_power_of_two),
    "recursive_doubling": Schedule(butterfly.recursive_doubling, Goal.ALL_REDUCE, one_chunk),
    "circulant": Schedule(circulant.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "all_to_all": Schedule(all_to_all.all_reduce, Goal.ALL_REDUCE, one_per_rank),
    "master_worker": Schedule(master_worker.all_reduce, Goal.ALL_REDUCE, one_chunk),
    "round_robin": Schedule(master_worker.round_robin, Goal.ALL_REDUCE, one_per_rank),
    "naive_all_to_all": Schedule(all_to_all.naive, Goal.ALL_REDUCE, one_chunk),
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
    "tree_broadcast": Schedule(tree.broadcast, Goal.BROADCAST, one_chunk),
    "tree_reduce": Schedule(tree.reduce, Goal.REDUCE, one_chunk),
    "tree_gather": Schedule(tree.gather, Goal.GATHER, one_per_rank),
    "tree_scatter": Schedule(tree.scatter, Goal.SCATTER, one_per_rank),
    "master_worker_reduce": Schedule(master_worker.reduce, Goal.REDUCE, one_chunk),
    "master_worker_broadcast": Schedule(master_worker.broadcast, Goal.BROADCAST, one_chunk),
}
BETWEEN_HOSTS = {
    "hierarchical": "ring",
    "hierarchical+butterfly": "butterfly",
    "hierarchical+recursive_doubling": "recursive_doubling",
    "hierarchical+tree": "tree",
}
OVER_SHARDS = {  # by number of shards
    "slice_owners": lambda num_shards: all_to_all.schedule_over_shards(num_shards, Goal.ALL_REDUCE),
}

SHIPPED = frozenset({"auto", "shared_memory", "two_dimensional", *SCHEDULES, *BETWEEN_HOSTS, *OVER_SHARDS})
MOST_CHUNKS = 1 << 20  # of a user's schedule, in chunks of a buffer
MOST_ROUNDS = 10_000  # of a user's schedule, and ten more per rank; with more it counts as endless


def all_reduce_schedules(hosts: Hosts) -> dict[str, Schedule]:
    """Returns every all-reduce for the ranks on these hosts, by name.

    Schedules that need a layout are left out if they would equal a flat one: `two_dimensional` needs ranks that fill a
    grid, the hierarchical ones need several hosts, one of them with several ranks. A user's schedules are left out if
    they are wrong for this number of ranks.

    Raises:
        ValueError: the hosts do not hold each rank 0, 1, … exactly once.
    """
    ranks = sorted(rank for host in hosts for rank in host)
    if not ranks or ranks != list(range(len(ranks))) or not all(hosts):
        raise ValueError(f"hosts={hosts}: give every host its ranks, each of 0, 1, 2, … exactly once, none empty")
    found = {name: each for name, each in ALL_REDUCE.items() if name in SHIPPED or not _fault(each, len(ranks))}
    rows = placed.rows_of(hosts)
    if len(rows) > 1:
        in_rows = partial(placed.two_dimensional, rows=rows)
        found["two_dimensional"] = Schedule(in_rows, Goal.ALL_REDUCE, one_per_rank)
    if 1 < len(hosts) < len(ranks):
        found |= {name: _hierarchical(hosts, ALL_REDUCE[between]) for name, between in BETWEEN_HOSTS.items()}
    return found


def _hierarchical(hosts: Hosts, between: Schedule) -> Schedule:
    num_chunks = between.num_chunks(len(hosts))
    algorithm = partial(placed.hierarchical, hosts=hosts, between=between)
    return Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: num_chunks)


# --- a user's all-reduces ----------------------------------------------------------------------------------------


def register(name: str, algorithm: Algorithm, *, num_chunks: Callable[[int], int] = one_per_rank) -> None:
    """Adds an all-reduce to the catalog under this name; to be called before `ddp.init`.

    All ranks must register the same: ranks that run different schedules wait for each other until the deadline.

    Args:
        algorithm: `algorithm(rank, num_ranks)` yields that rank's rounds, as `ring.all_reduce` does.
        num_chunks: the number of chunks into which it cuts the buffer, by number of ranks.

    Raises:
        ConfigError: the name is taken or not an identifier, or the schedule is wrong for one of 1 to 8 ranks.
    """
    if not name.isidentifier():
        raise ConfigError(f"schedule {name!r}: is not a name; take letters, digits and underscores")
    if name in SHIPPED or name in ALL_REDUCE:
        raise ConfigError(f"schedule {name!r}: the name is taken; choose another one")
    schedule = own_all_reduce(Schedule(algorithm, Goal.ALL_REDUCE, num_chunks))
    for num_ranks in range(1, 9):
        prove(schedule, num_ranks, what=f"schedule {name!r}")
    add(name, schedule)


def add(name: str, schedule: Schedule) -> None:
    """Adds a user's all-reduce to the catalog."""
    ALL_REDUCE[name] = SCHEDULES[name] = schedule


def own_schedules() -> list[str]:
    """Returns the names of the user's all-reduces."""
    return [name for name in ALL_REDUCE if name not in SHIPPED]


def own_all_reduce(found: Schedule | Algorithm) -> Schedule:
    """Returns a user's schedule with readable errors; a plain generator has one chunk per rank."""
    schedule = found if isinstance(found, Schedule) else Schedule(found, Goal.ALL_REDUCE, one_per_rank)
    algorithm, num_chunks = partial(_guarded, schedule.algorithm), partial(_counted, schedule.num_chunks)
    return schedule._replace(algorithm=algorithm, num_chunks=num_chunks)


def prove(schedule: Schedule, num_ranks: int, *, what: str) -> None:
    """Checks a user's schedule.

    Raises:
        ConfigError: it is not a correct all-reduce for this number of ranks; the message begins with `what`, and says
            where.
    """
    if fault := _fault(schedule, num_ranks):
        raise ConfigError(f"{what}: {fault}")


@lru_cache(maxsize=256)
def _fault(schedule: Schedule, num_ranks: int) -> str:
    """Returns the fault of a schedule, or an empty text."""
    if schedule.goal is not Goal.ALL_REDUCE:
        return f"is not an all-reduce: its goal is that {schedule.goal.value}"
    if schedule.num_shards is not None:
        return "adds up shards, but an all-reduce adds up ranks: leave num_shards out"
    try:
        schedule.check(num_ranks)
    except ScheduleError as error:
        return str(error)
    return ""


def _counted(num_chunks: Callable[[int], int], num_ranks: int) -> int:
    """Returns the number of chunks by the user's function."""
    try:
        number: object = num_chunks(num_ranks)
    except Exception as error:
        raise ScheduleError(f"{num_ranks} ranks, num_chunks raises {type(error).__name__}: {error}") from error
    if type(number) is not int or not 1 <= number <= MOST_CHUNKS:
        raise ScheduleError(f"{num_ranks} ranks, num_chunks is {number!r}, not a whole number from 1 to {MOST_CHUNKS}")
    return number


def _guarded(algorithm: Algorithm, rank: int, num_ranks: int) -> Iterator[Round]:
    """Yields the rounds of the user's generator, after checking the types in them."""
    number = 0

    def wrong(what: str) -> ScheduleError:
        return ScheduleError(f"{num_ranks} ranks, rank {rank} in round {number + 1}: {what}")

    try:
        for ops in algorithm(rank, num_ranks):
            transfers = [op for op in ops if isinstance(op, Send | Recv)] if isinstance(ops, tuple) else []
            if not isinstance(ops, tuple) or len(transfers) < len(ops):  # a rank has no second buffer for an Add
                raise wrong(f"yields {ops!r:.80}, which is not a tuple of Send and Recv")
            if not all(type(op.peer) is int and isinstance(op.chunks, range) for op in transfers):
                raise wrong(f"yields {ops!r:.80}, where a peer is not a whole number, or chunks are not a range")
            if number == MOST_ROUNDS + 10 * num_ranks:
                raise wrong("never ends; a schedule must end")
            yield ops
            number += 1
    except ScheduleError:
        raise
    except Exception as error:
        raise wrong(f"raises {type(error).__name__}: {error}") from error
