"""Calibration: every rank ends with the same figures, of the right form, whatever the layout. No timings are judged."""

from __future__ import annotations

import json
import math

import pytest
from faulty import Faulty
from ranks import run_ranks
from torch.distributed import HashStore

import ddp.comm.calibrate as calibration
from ddp.collectives.placed import Hosts
from ddp.comm.calibrate import Curve, Measured, agreed, calibrate, figures
from ddp.comm.flat_collectives import FlatCollectives
from ddp.comm.host_links import HostLinks
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import Transport, TransportError
from ddp.comm.watch.watchdog import Watchdog
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport


def links_of(transport: Transport, hosts: Hosts, settings: Settings) -> FlatCollectives:
    """Returns edges that nobody watches, and no memory."""
    watchdog = Watchdog(HashStore(), transport.rank, 1, generation=0, warn_s=math.inf, abort_s=settings.abort_s)
    return FlatCollectives(HostLinks(transport, watchdog, settings), hosts)


def on_threads(hosts: Hosts) -> list[Measured]:
    patient = Settings(abort_s=20)
    network = SimulatedNetwork(sum(map(len, hosts)))
    return network.run(lambda transport: calibrate(links_of(transport, hosts, patient), patient))


def is_sane(measured: Measured) -> bool:
    network = measured.network
    links = (network.inside, network.between)
    figures = [figure for link in links for figure in (link.alpha_s, link.beta_s, link.gap_s)]
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
    assert first.ordinary is first.allocated is None
    assert all(other == first for other in others)


def test_links_that_do_not_exist_are_the_others() -> None:
    one_host, hosts_of_one = on_threads(((0, 1),))[0].network, on_threads(((0,), (1,)))[0].network
    assert one_host.between == one_host.inside
    assert hosts_of_one.inside == hosts_of_one.between


def test_one_rank_has_nothing_to_measure() -> None:
    (alone,) = on_threads(((0,),))
    assert alone.network.inside.alpha_s == alone.network.between.beta_s == 0.0


def test_a_rank_that_fails_ends_it_within_the_deadline() -> None:
    impatient = Settings(abort_s=0.2)

    def program(transport: SimulatedTransport) -> str:
        faulty = Faulty(transport, fail_at={1: 3}, how="silent")
        try:
            calibrate(links_of(faulty, ((0,), (1,), (2,)), impatient), impatient)
        except TransportError as error:
            return str(error)
        return "no error"

    assert all("timed out" in text for text in SimulatedNetwork(3).run(program))


# --- from times to figures -------------------------------------------------------------------------------------------


def test_what_the_times_become() -> None:
    times = {"adding": calibration.BULK_BYTES * 1e-11}
    times |= {"inside alpha": 4e-6, "inside gap": 11e-6, "inside beta": 4e-6 + calibration.BULK_BYTES * 1e-10}
    times |= {"between alpha": 1e-3, "between gap": 1e-3, "between beta": 1e-3 + calibration.BULK_BYTES * 1e-9}
    network = figures(times, ((0, 1), (2, 3))).network
    assert (network.inside.alpha_s, network.inside.beta_s, network.inside.gap_s) == pytest.approx((4e-6, 1e-10, 1e-6))
    assert (network.between.alpha_s, network.between.beta_s, network.between.gap_s) == pytest.approx((1e-3, 1e-9, 0))
    assert network.gamma_s == pytest.approx(1e-11)


def test_of_ranks_the_slowest_counts_and_of_repetitions_the_median() -> None:
    """Rank 1 had no part in the first measurement."""
    everyone = [{"a": [1.0, 9.0, 1.0], "b": [5.0]}, {"b": [4.0]}, {"a": [2.0, 1.0, 3.0], "b": [1.0]}]
    assert agreed({}, lambda mine: [json.dumps(times).encode() for times in everyone]) == {"a": 3.0, "b": 5.0}


def test_memory_that_nobody_could_allocate_is_as_slow_as_any() -> None:
    small, large = calibration.MEMORY_BYTES[:2]
    measured = figures({"adding": 1e-4, f"ordinary {small}": 1e-5, f"ordinary {large}": 2e-5}, ((0, 1),))
    assert measured.ordinary == measured.allocated == Curve((small, large), (1e-5, 2e-5))


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve((1000, 2000, 4000), (1.0, 3.0, 4.0))
    assert [curve.at(nbytes) for nbytes in (0, 1000, 1500, 2000, 3000, 4000, 8000)] == [1, 1, 2, 3, 3.5, 4, 6]


def test_a_curve_that_falls_does_not_fall_for_ever() -> None:
    curve = Curve((1000, 2000), (3.0, 2.0))
    assert [curve.at(nbytes) for nbytes in (1500, 2000, 1_000_000)] == [2.5, 2.0, 2.0]


# --- processes, and memory -------------------------------------------------------------------------------------------


def _calibrated() -> tuple[Measured, Measured]:
    """Returns the figures of two ranks of one host: with their memory, and as if they were on two hosts."""
    import ddp

    comm = ddp.init(abort_s=30)
    collectives, settings = comm._collectives, comm.settings
    assert collectives.group is not None
    one_host = calibrate(collectives, settings)
    apart = calibrate(FlatCollectives(collectives.links, ((0,), (1,))), settings)
    ddp.shutdown()
    return one_host, apart


def test_two_processes_agree_on_links_and_memory() -> None:
    (one_host, apart), *others = run_ranks(_calibrated, 2)
    assert others == [(one_host, apart)]
    assert is_sane(one_host)
    assert is_sane(apart)
    assert apart.ordinary is None
    assert one_host.ordinary is not None
    assert one_host.allocated is not None
    for curve in (one_host.ordinary, one_host.allocated):
        assert curve.nbytes == calibration.MEMORY_BYTES
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in curve.seconds)
        assert curve.at(1 << 28) > 0
