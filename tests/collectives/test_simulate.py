"""The simulator: single messages by hand, the executor's messages to the byte, shared links, overlap, 10,000 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from ddp.collectives.catalog import ALL_REDUCE, SCHEDULES, all_reduce_schedules
from ddp.collectives.cost import Link, Network, equal_hosts
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Goal, Recv, Round, Schedule, ScheduleError, Send, offsets
from ddp.collectives.simulate import Timeline, repeats, simulate
from ddp.comm.execute import Scratch, execute
from ddp.comm.execute import program as program_for
from ddp.comm.transport.edge import Pending, Transfer
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport

ALPHA, BETA, GAMMA = 3e-6, 2e-9, 5e-10
ANY = 1 << 40  # a segment that is never reached


def alone(num_ranks: int, **more: float) -> Network:
    """Every rank on a host of its own."""
    return Network(equal_hosts(num_ranks, 1), Link(0, 0), Link(ALPHA, BETA, **more), GAMMA)


def one_host(num_ranks: int, **more: float) -> Network:
    return Network(equal_hosts(num_ranks, num_ranks), Link(ALPHA, BETA, **more), Link(1, 1), GAMMA)


def schedule_of(*programs: list[Round], num_chunks: int = 1) -> Schedule:
    """One that is written out, rank by rank."""

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        return iter(programs[rank])

    return Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: num_chunks)


CHUNK = range(1)

# --- one message, and what it waits for ------------------------------------------------------------------------------


def test_a_message_arrives_after_alpha_and_its_bytes_and_frees_its_sender_before() -> None:
    timeline = simulate(
        schedule_of([(Send(1, CHUNK),)], [(Recv(0, CHUNK, add=True),)]), alone(2), 1000, every_host=True
    )
    assert timeline.finish_s == pytest.approx((4000 * BETA, ALPHA + 4000 * (BETA + GAMMA)))
    (moved,) = timeline.moved
    assert (moved.sender, moved.receiver, moved.round_number, moved.lane, moved.num_bytes) == (0, 1, 0, 0, 4000)
    assert (moved.start_s, moved.end_s) == pytest.approx((0, ALPHA + 4000 * BETA))


def test_messages_of_one_rank_follow_each_other_at_a_distance() -> None:
    gap_s = 1e-6
    fan = schedule_of(
        [tuple(Send(peer, CHUNK) for peer in (1, 2, 3))], *[[(Recv(0, CHUNK, add=False),)] for _ in range(3)]
    )
    finish_s = simulate(fan, one_host(4, gap_s=gap_s), 1000).finish_s
    assert finish_s[1:] == pytest.approx([ALPHA + (k + 1) * 4000 * BETA + k * gap_s for k in range(3)])


def test_the_ranks_of_a_host_share_its_link_both_ways() -> None:
    """Ranks 0, 1 of host 0 each exchange with ranks 2, 3 of host 1: the bytes of both go one after another."""
    exchange = schedule_of(*[[(Send((r + 2) % 4, CHUNK), Recv((r + 2) % 4, CHUNK, add=False))] for r in range(4)])
    apart = simulate(exchange, alone(4), 1000)
    together = simulate(exchange, Network(equal_hosts(4, 2), Link(0, 0), Link(ALPHA, BETA), GAMMA), 1000)
    assert apart.makespan_s == pytest.approx(ALPHA + 4000 * BETA)
    assert together.makespan_s == pytest.approx(ALPHA + 2 * 4000 * BETA)
    assert together.host_bytes_sent == (8000, 8000)
    assert simulate(exchange, one_host(4), 1000).host_bytes_sent == (0,)


def test_lanes_overlap() -> None:
    """A relay 0 → 1 → 2 in eight pieces: while rank 1 passes one on, the next one comes in."""
    relay = schedule_of(
        [(Send(1, CHUNK),)], [(Recv(0, CHUNK, add=False),), (Send(2, CHUNK),)], [(Recv(1, CHUNK, add=False),)]
    )
    network = alone(3)
    at_once, in_pieces = (simulate(relay, network, 8000, segment_bytes=size) for size in (ANY, 4000))
    assert (at_once.num_lanes, in_pieces.num_lanes) == (1, 8)
    assert at_once.makespan_s == pytest.approx(2 * (ALPHA + 32000 * BETA))
    assert in_pieces.makespan_s == pytest.approx(2 * ALPHA + 9 * 4000 * BETA)
    assert in_pieces.bytes_sent == at_once.bytes_sent == (32000, 32000, 0)


def test_additions_of_one_lane_hide_behind_the_bytes_of_another() -> None:
    """γ = β: one message costs both, two halves cost one half more than the bytes alone."""
    network = Network(equal_hosts(2, 1), Link(0, 0), Link(0, BETA), BETA)
    sums = schedule_of([(Send(1, CHUNK),)], [(Recv(0, CHUNK, add=True),)])
    assert simulate(sums, network, 1000, segment_bytes=ANY).makespan_s == pytest.approx(8000 * BETA)
    assert simulate(sums, network, 1000, segment_bytes=2000).makespan_s == pytest.approx(6000 * BETA)


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_deadlock_and_unequal_messages_are_named() -> None:
    waiting = schedule_of(*[[(Recv(1 - r, CHUNK, add=False),), (Send(1 - r, CHUNK),)] for r in range(2)])
    with pytest.raises(ScheduleError, match="deadlock with 2 ranks: rank 0 in round 1"):
        simulate(waiting, alone(2), 10)
    unequal = schedule_of([(Send(1, range(1)),)], [(Recv(0, range(2), add=False),)], num_chunks=2)
    with pytest.raises(ScheduleError, match="rank 0 sends 20 bytes, rank 1 expects 40"):
        simulate(unequal, alone(2), 10)


# --- every schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_counts_are_those_of_the_proof(name: str, num_ranks: int) -> None:
    """Messages, chunks and rounds as `check` counts them, on any of whose runs it is silent."""
    schedule = SCHEDULES[name]
    proof = schedule.check(num_ranks)
    timeline = simulate(schedule, one_host(num_ranks), 3 * proof.num_chunks, segment_bytes=ANY)
    assert timeline.num_rounds == proof.num_rounds
    assert timeline.num_messages == sum(proof.messages_sent)
    assert timeline.bytes_sent == tuple(12 * chunks for chunks in proof.chunks_sent)


@pytest.mark.parametrize("name", ["ring", "butterfly", "double_tree", "all_to_all", "master_worker", "circulant"])
@pytest.mark.parametrize(("numel", "segment_bytes"), [(0, 64), (3, 64), (101, ANY), (101, 64), (101, 12)])
def test_messages_are_those_of_the_executor(name: str, numel: int, segment_bytes: int) -> None:
    """Edge by edge, in order of posting, to the byte."""
    num_ranks, schedule = 5, SCHEDULES[name]
    bounds = tuple(offsets(numel, schedule.num_chunks(num_ranks)))
    sent: dict[tuple[int, int], list[int]] = {}

    def recorded(transport: SimulatedTransport, sends: list[Transfer], receives: list[Transfer]) -> Pending:
        for peer, data in sends:
            sent.setdefault((transport.rank, peer), []).append(data.nbytes)
        return SimulatedTransport.post(transport, sends, receives)

    def program(transport: SimulatedTransport) -> None:
        transport.post = partial(recorded, transport)  # type: ignore[method-assign]
        execute(
            program_for(schedule.algorithm, transport.rank, num_ranks, (bounds,), segment_numel=segment_bytes // 4),
            [torch.zeros(numel)],
            transport,
            scratch=Scratch(),
            timeout_s=20,
        )

    SimulatedNetwork(num_ranks).run(program)
    simulated: dict[tuple[int, int], list[int]] = {}
    timeline = simulate(schedule, alone(num_ranks), numel, segment_bytes=segment_bytes, every_host=True)
    for moved in timeline.moved:
        simulated.setdefault((moved.sender, moved.receiver), []).append(moved.num_bytes)
    assert simulated == sent


def hosts_of(num_ranks: int) -> list[Hosts]:
    sizes = [k for k in (1, 2, 3, 4, num_ranks) if k <= num_ranks]
    return list(dict.fromkeys(equal_hosts(num_ranks, k) for k in sizes))


def same(one: Timeline, other: Timeline) -> bool:
    """All but the list of messages, and to the last bit or two: equal times are added in another order."""
    assert one.finish_s == pytest.approx(other.finish_s, rel=1e-12)
    ours, theirs = vars(one) | {"finish_s": (), "moved": ()}, vars(other) | {"finish_s": (), "moved": ()}
    return ours == theirs


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 12])
def test_one_host_for_all_is_the_same_as_all_hosts(num_ranks: int) -> None:
    """Keeping the messages turns the short cut off."""
    folded = 0
    for hosts in hosts_of(num_ranks):
        network = Network(hosts, Link(3e-6, 1e-9, 1e-7), Link(2e-5, 8e-9, 3e-7), 1e-10)
        for name, schedule in all_reduce_schedules(hosts).items():
            folded += repeats(schedule, hosts)
            for segment_bytes in (ANY, 256):
                numel = schedule.num_chunks(num_ranks) * 100
                short, plain = (
                    simulate(schedule, network, numel, segment_bytes=segment_bytes, every_host=keep)
                    for keep in (False, True)
                )
                assert same(short, plain), (name, hosts)
                assert len(plain.moved) == plain.num_messages
    assert folded >= 3


def test_what_repeats() -> None:
    hosts = equal_hosts(12, 3)
    repeating = {name for name, schedule in all_reduce_schedules(hosts).items() if repeats(schedule, hosts)}
    assert repeating >= {"ring", "all_to_all", "naive_all_to_all", "two_dimensional", "hierarchical"}
    assert repeating.isdisjoint({"tree", "master_worker", "round_robin", "recursive_doubling"})
    assert not repeats(ALL_REDUCE["ring"], ((0, 1), (2,)))
    assert not repeats(ALL_REDUCE["ring"], ((0, 2), (1, 3)))


@pytest.mark.parametrize("name", ["ring", "tree", "butterfly", "recursive_doubling", "hierarchical", "two_dimensional"])
@pytest.mark.quick(1)
def test_two_thousand_ranks(name: str) -> None:
    many_ranks(name, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "two_dimensional"])
def test_ten_thousand_ranks(name: str) -> None:
    many_ranks(name, 10_000)


def many_ranks(name: str, num_ranks: int) -> None:
    network = Network(equal_hosts(num_ranks, 8), Link(1e-6, 1e-10), Link(1e-5, 1e-9), 1e-10)
    schedule = all_reduce_schedules(network.hosts)[name]
    num_chunks = schedule.num_chunks(num_ranks)
    timeline = simulate(schedule, network, num_chunks)
    assert len(timeline.finish_s) == num_ranks
    assert min(timeline.finish_s) > 0
    depth = (num_ranks - 1).bit_length()
    rounds = {"ring": 2 * (num_ranks - 1), "tree": 2 * depth, "butterfly": 22, "recursive_doubling": 12}
    rounds |= {"hierarchical": 6 + 2 * (num_ranks // 8 - 1), "two_dimensional": 14 + 2 * (num_ranks // 8 - 1)}
    assert timeline.num_rounds == rounds[name]
    if name == "ring":
        assert timeline.num_messages == 2 * num_ranks * (num_ranks - 1)
        assert timeline.makespan_s == pytest.approx(2 * (num_ranks - 1) * (1e-5 + 4e-9) + (num_ranks - 1) * 4e-10)
