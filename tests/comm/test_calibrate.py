"""Calibration: every rank ends with the same figures, of the right form, whatever the layout. No timings are judged."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

import ddp.comm.calibrate as calibration
from ddp.collectives.catalog import ALL_REDUCE
from ddp.collectives.cost import price
from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import equal_hosts
from ddp.comm.calibrate import Curve, Measured, calibrate
from ddp.transport.edge import TransportError
from ddp.transport.faulty import Faulty
from ddp.transport.simulated import SimulatedNetwork, SimulatedTransport


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_known", {})


class Meeting:
    """An all-gather of bytes between threads; counts its rounds."""

    def __init__(self, world_size: int) -> None:
        self.num_gathers = 0
        self._texts: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size, self._count)

    def _count(self) -> None:
        self.num_gathers += 1

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(mine: bytes) -> list[bytes]:
            self._texts[rank] = mine
            self._barrier.wait(20)
            texts = list(self._texts)
            self._barrier.wait(20)
            return texts

        return gather


def on_threads(hosts: Hosts, *, meeting: Meeting | None = None) -> list[Measured]:
    world_size = sum(map(len, hosts))
    meet = meeting or Meeting(world_size)

    def program(transport: SimulatedTransport) -> Measured:
        return calibrate(transport, hosts, None, meet.of(transport.rank), timeout_s=20)

    return SimulatedNetwork(world_size).run(program)


def is_sane(measured: Measured) -> bool:
    network = measured.network
    links = (network.inside, network.between)
    figures = [figure for link in links for figure in (link.alpha_s, link.beta_s, link.announce_s, link.gap_s)]
    return (
        all(math.isfinite(f) and f >= 0 for f in figures) and network.gamma_s > 0 and min(x.alpha_s for x in links) > 0
    )


@pytest.mark.parametrize(
    "hosts", [((0, 1),), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 4), (1, 3)), ((0, 1), (2,))], ids=str
)
def test_all_ranks_agree(hosts: Hosts) -> None:
    first, *others = on_threads(hosts)
    assert is_sane(first)
    assert first.network.hosts == hosts
    assert first.shared is None
    assert all(other == first for other in others)


def test_links_that_do_not_exist_are_the_others() -> None:
    one_host, hosts_of_one = on_threads(((0, 1),))[0].network, on_threads(((0,), (1,)))[0].network
    assert one_host.between == one_host.inside
    assert hosts_of_one.inside == hosts_of_one.between


def test_one_rank_has_nothing_to_measure() -> None:
    (alone,) = on_threads(((0,),))
    assert alone.network.inside.alpha_s == alone.network.between.beta_s == 0.0


def test_a_layout_is_measured_once() -> None:
    """The second time a single gather finds out that everyone has the figures still; a rank that has not, ends that."""
    hosts = equal_hosts(4, 2)
    meeting = Meeting(4)
    first = on_threads(hosts, meeting=meeting)
    rounds = meeting.num_gathers
    again = on_threads(((0, 2), (1, 3)), meeting=meeting)
    assert meeting.num_gathers - rounds == rounds / 2
    assert again[0].network.inside == first[0].network.inside
    assert again[0].network.hosts == ((0, 2), (1, 3))
    on_threads(equal_hosts(3, 3))
    assert len(calibration._known) == 2


def test_a_rank_that_fails_ends_it_within_the_deadline() -> None:
    hosts = equal_hosts(3, 1)
    meet = Meeting(3)

    def program(transport: SimulatedTransport) -> str:
        faulty = Faulty(transport, fail_at={1: 3}, how="silent")
        try:
            calibrate(faulty, hosts, None, meet.of(transport.rank), timeout_s=0.2)
        except TransportError as error:
            return str(error)
        return "no error"

    assert all("timed out" in text for text in SimulatedNetwork(3).run(program))


# --- from times to figures -------------------------------------------------------------------------------------------

PLAN = calibration._Plan(num_rounds=8, num_repetitions=4, bulk_bytes=1_000_000, num_bulks=3)


def measured_from(hosts: Hosts, whole_s: float, **more: float) -> Measured:
    """What three repetitions of these times give, on every rank; the rest is a link of one microsecond."""
    usual = "inside" if max(map(len, hosts)) > 1 else "between"
    times = {"adding": 4e-4, "sums": 9e-6, "whole": whole_s, **more}
    for link in ("inside", "between"):
        times |= {f"{link} small": 7e-6, f"{link} one way": 4e-6, f"{link} many": 14e-6, f"{link} bulk": 7e-6 + 1e-3}
    everyone = [{name: [seconds] * 3 for name, seconds in times.items()} for host in hosts for _ in host]
    return calibration._measured(everyone, {"inside": PLAN, "between": PLAN}, hosts, usual)


def test_what_the_times_become() -> None:
    measured = measured_from(((0, 1), (2, 3)), 1.0)
    link = measured.network.between
    assert (link.alpha_s, link.announce_s, link.gap_s, link.beta_s) == pytest.approx((4e-6, 3e-6, 1e-6, 1e-9))
    assert measured.network.inside.shared_s == 0.0  # no pair was measured alone
    assert measured.network.addition_s == pytest.approx(2e-6)
    assert measured.network.gamma_s == pytest.approx(4e-4 / calibration.ADD_BYTES)


def test_a_pair_alone_tells_what_the_ranks_of_a_host_share() -> None:
    link = measured_from(((0, 1, 2, 3),), 1.0, **{"inside bulk one way": 4e-6 + 4e-4}).network.inside
    assert (link.beta_s, link.shared_s) == pytest.approx((4e-10, 1e-9 / 4))


def test_what_an_exchange_takes_longer_among_all_than_alone_keeps_the_host_busy() -> None:
    link = measured_from(((0, 1, 2, 3),), 1.0, **{"inside pair": 5e-6}).network.inside
    assert (link.alpha_s, link.announce_s, link.busy_s) == pytest.approx((4e-6, 1e-6, 2e-6 / 4))
    assert link.gap_s == 0.0  # eight times as many messages took no longer than their share


@pytest.mark.parametrize("whole_s", [5e-6, 1e-3])
def test_the_whole_collective_has_the_last_word(whole_s: float) -> None:
    """Faster than its rounds: they are scaled down. Slower: that is what a call costs."""
    measured = measured_from(equal_hosts(4, 1), whole_s)
    price_s = price("recursive_doubling", ALL_REDUCE["recursive_doubling"], calibration.SMALL_BYTES, measured.network)
    assert price_s + measured.call_s == pytest.approx(whole_s, rel=0.02)
    assert (measured.call_s > 0) == (whole_s == 1e-3)


def test_what_memory_and_wire_cost_together_beyond_their_parts() -> None:
    memory = {f"ordinary {size}": 1e-5 for size in calibration.MEMORY_BYTES}
    measured = measured_from(((0, 1), (2, 3)), 1e-3, mixed=1e-4, **memory)
    assert measured.shared is not None
    assert measured.shared.allocated == measured.shared.ordinary  # nobody could allocate
    assert measured.mixed_call_s == pytest.approx(1e-4 - 1e-5 - 9e-6)


def test_a_slow_link_is_measured_less_often_and_with_fewer_bytes() -> None:
    fast, slow = calibration._Plan.after(2e-5, 1e-4), calibration._Plan.after(2e-2, 5e-2)
    assert slow.num_rounds == 1 < fast.num_rounds
    assert slow.num_repetitions < fast.num_repetitions
    assert calibration.LOOK_BYTES <= slow.bulk_bytes < fast.bulk_bytes == calibration.BULK_BYTES


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve((1000, 2000, 4000), (1.0, 3.0, 4.0))
    assert [curve.at(nbytes) for nbytes in (0, 1000, 1500, 2000, 3000, 4000, 8000)] == [1, 1, 2, 3, 3.5, 4, 6]


def test_a_curve_that_falls_does_not_fall_for_ever() -> None:
    curve = Curve((1000, 2000), (3.0, 2.0))
    assert [curve.at(nbytes) for nbytes in (1500, 2000, 1_000_000)] == [2.5, 2.0, 2.0]


# --- processes, and memory -------------------------------------------------------------------------------------------


def _calibrated() -> tuple[Measured, Measured]:
    """Two ranks of one host: with their memory, and without it."""
    import torch.distributed as dist

    from ddp.comm.host_reduce import meet
    from ddp.transport.process_group import process_group_transport

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def gather(mine: bytes) -> list[bytes]:
        found: list[bytes] = [b""] * world_size
        dist.all_gather_object(found, mine)
        return found

    cpu, store = torch.device("cpu"), dist.distributed_c10d._get_default_store()
    transport = process_group_transport(cpu, "gloo", store=store, rank=rank, world_size=world_size, timeout_s=30)
    hosts, group, reason = meet(rank, gather, timeout_s=30)
    assert group is not None, reason
    one_host = calibrate(transport, hosts, group, gather, timeout_s=30)
    pretended = tuple((r,) for r in range(world_size))
    apart = calibrate(transport, pretended, None, gather, timeout_s=30)
    group.close()
    return one_host, apart


def test_two_processes_agree_on_links_and_memory() -> None:
    (one_host, apart), *others = run_ranks(_calibrated, 2)
    assert others == [(one_host, apart)]
    assert is_sane(one_host)
    assert is_sane(apart)
    assert apart.shared is None
    assert one_host.shared is not None
    for curve in (one_host.shared.ordinary, one_host.shared.allocated):
        assert curve.nbytes == calibration.MEMORY_BYTES
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in curve.seconds)
        assert curve.at(1 << 28) > 0
