"""A watchdog lives as long as somebody knows it."""

from __future__ import annotations

import gc
import threading

import torch

from ddp.comm.communicator import Communicator
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport


def test_a_watchdog_ends_with_a_communicator_that_was_dropped_without_a_word() -> None:
    def program(transport: SimulatedTransport) -> threading.Thread:
        comm = Communicator(transport)
        comm.all_reduce(torch.ones(3))
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        return comm._watchdog._thread

    threads = SimulatedNetwork(2).run(program)
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_watchdog_lives_while_its_communicator_does() -> None:
    comm = Communicator(SimulatedNetwork(1).transport(0))
    gc.collect()
    assert comm._watchdog._thread.is_alive()
    comm.close()
    assert not comm._watchdog._thread.is_alive()
