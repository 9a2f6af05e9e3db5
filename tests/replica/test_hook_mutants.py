"""One-line mutants of what holds for hooks and wire formats die: totals first, their own step flag, the transaction,
one order."""

from __future__ import annotations

from typing import Any

import pytest
import test_hooked
import test_wire
from ranks import RankFailed, run_ranks
from test_replica_mutants import Mutant, mutated

import ddp
from ddp.gradients import ErrorFeedback, Sign
from ddp.replica.bucketed import BucketedDataParallel

pytestmark = pytest.mark.slow  # because what is proven here is that other tests can fail

HOOKED, WIRED = "hooked", "wired"
BACKWARD, FINALIZER = "replica.backward.Backward", "replica.step_finalizer.StepFinalizer"
COMPRESSION = "gradients.compression.Compression"
MUTANTS = {
    "the count travels in the wire format": Mutant(
        "gradients.layout.Layout.__init__",
        "reducer.tails_ride and",
        "",
        WIRED,
        "counts",
    ),
    "ranks keep their own totals": Mutant(
        "gradients.totals.Rider.send", "if self.carrier is None:", "if False:", HOOKED, "last_batch"
    ),
    "a hook sees the sum": Mutant(
        f"{COMPRESSION}._reduce",
        "comm.sum_in_host(bucket.flat, divide_by=divide_by)",
        "comm.sum_in_host(bucket.flat)",
        HOOKED,
        "last_batch",
    ),
    "no flag shows what a hook has hidden": Mutant(
        f"{FINALIZER}.write_hidden_flags", ".add_(", ".mul_(", HOOKED, "finite"
    ),
    "a refused gradient stays in the hook": Mutant(
        f"{FINALIZER}._refuse", "self._reducer.take_back()", "pass", HOOKED, "finite"
    ),
    "a step that fit refuses is committed": Mutant(
        "replica.replica.Replica.take_back", "self.compression.take_back()", "pass", HOOKED, "veto"
    ),
    "a hook writes over what it had": Mutant(
        "gradients.hook.Memory.buffer_for",
        "spare = self._spare.pop(name, None)",
        "spare = self.committed.get(name)",
        HOOKED,
        "finite",
    ),
    "what nobody gets is lost": Mutant(
        f"{FINALIZER}._give_back", "self._reducer.take_back(slot.name)", "pass", HOOKED, "unused"
    ),
    "a collective in a chain waits for the chain": Mutant(
        "comm.call_queue.CallQueue.run",
        "in_chain = self._chain is not None and self._is_in_chain",
        "in_chain = False",
        HOOKED,
        "background",
    ),
    "padding stays as it came": Mutant(
        "gradients.bucket.Bucket.clear_padding", "self.flat.index_fill_(0, self._padding, 0)", "pass", WIRED, "again"
    ),
    "fp16 gets sums": Mutant("comm.host_links.HostLinks.run", "flat.mul_(1 / shrink)", "pass", WIRED, "items"),
}


def background(hook: Any) -> None:
    replica = BucketedDataParallel(test_hooked.made(), hook=hook, overlap=True, bucket_cap_mb=0.02)
    replica(test_hooked.X.unsqueeze(1)[:3]).square().mean().backward()


def counts() -> None:
    for wire in ("bf16", "int8"):
        test_wire.exact_count(wire)


CASES: dict[tuple[str, str], Any] = {
    (HOOKED, "last_batch"): lambda hook: test_hooked.last_batch_of_one_sample(BucketedDataParallel, hook, "sign"),
    (HOOKED, "finite"): lambda hook: test_hooked.not_finite(BucketedDataParallel, hook),
    (HOOKED, "veto"): test_hooked.vetoed,
    (HOOKED, "unused"): test_hooked.used_by_none,
    (HOOKED, "background"): background,
    (WIRED, "counts"): lambda _: counts(),
    (WIRED, "items"): lambda _: test_wire.many_items("fp16"),
    (WIRED, "again"): lambda _: test_wire.finite_again("int8"),
}


def run_case(mutant: Mutant | None) -> None:
    if mutant is not None:
        setattr(*mutated(mutant))
    comm = ddp.init(abort_s=3, shared_memory=False, algorithm="ring")
    for (cases, case), run in CASES.items():
        if mutant is None or (mutant.cases, mutant.case) == (cases, case):
            run(ErrorFeedback(Sign()))
            comm.barrier()
    ddp.shutdown()


def test_without_a_mutant_all_is_well() -> None:
    run_ranks(run_case, 2, None, timeout_s=30)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name: str) -> None:
    mutated(MUTANTS[name])
    with pytest.raises(RankFailed):
        run_ranks(run_case, 2, MUTANTS[name], timeout_s=8 if MUTANTS[name].case == "background" else 20)
