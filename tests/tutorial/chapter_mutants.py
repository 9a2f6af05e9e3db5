"""Runs each chapter against libraries with one thing wrong, and counts how often its assertions notice.

    .venv/bin/python tests/tutorial/chapter_mutants.py [CHAPTER …]     ten mutants of each chapter's subject; minutes

A mutant is a copy of the package in which one spot of one function is changed (tests/mutants.py).
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from mutants import changes  # noqa: E402

NUM_MUTANTS, LIMIT_S = 10, 90
SAME = {  # what a line may become without being wrong, and why
    "self._is_in_backward = True": "the next forward sets it back",
    "totals.num_items or 0": "some rank has samples",
    "totals.num_items or 2": "the same",
    "pack[1].new_empty": "the tensors of a pack have one type",
    "ready_s and": "a time that is only shown",
    "divide_by=2, sequence": "the caller always says it",
    "all_reduce(self, flat, op, *, divide_by=0": "the caller always says it",
    "// self.size * dtype.itemsize": "larger blocks are only slower",
    "self.posted.get(route, -1)": "both ends count from another number alike",
    "self.posted.get(route, 1)": "both ends count from another number alike",
    "flat.nbytes < SMALL_BYTES": "a tensor of just that size may go either way",
    "-(-numel * (size * unit))": "one rank adds everything, which is right, and slow",
    "self.posted.get(route, 0) + 2": "both ends count in twos alike",
    "pack[-1].new_empty": "the tensors of a pack have one type",
    "LINE_BYTES * itemsize": "larger units are only slower",
    "numel, dim=0": "larger blocks are only slower",
    "if ranks[2:] else": "of two ranks, as here, both lists are empty",
    "if ranks[0:] else": "names the same deadlock",
    "max(0, LINE_BYTES": "a line has more bytes than an element",
    "max(2, LINE_BYTES": "a line has more bytes than an element",
    "min(1, LINE_BYTES": "smaller units are only slower",
    "(size + unit)": "other units are only slower",
    "BLOCK_BYTES * self.size": "larger blocks are only slower",
    "stop >= start": "no blocks, or blocks of nothing",
    "block[0:]": "copies a sum over itself, too",
    "> SMALL_ALLOCATED_BYTES": "a tensor of about that size may go either way",
    ">= SMALL_ALLOCATED_BYTES": "a tensor of about that size may go either way",
    "status <= 0": "workers that fail have no status 0",
    "status < 1": "the same",
    "status < -1": "no death here is by signal 1",
    "poll(1)": "a millisecond more",
    "is not None or 'schedule' in parts": "a run with a schedule has saved it",
    "is not None or hasattr": "a process always has a number here",
    "(-1, signs": "a tensor of one dimension",
    "(-1, where": "a tensor of one dimension",
    "(-1, positions": "a tensor of one dimension",
    "parcels[-1].gradient": "gradients of one bucket have one type and one device",
    "part.stop + part.start": "of one rank a host, the part is everything",
    "FIRST_PORT - zlib": "another port, alike on all ranks",
    "not in b'\\x00'": "the first process of all, alike on all ranks",
    "'MASTER_PORT' not in env": "an address that a world of one does not use",
    "is not _TORCHRUN or local": "Slurm's ranks have a place to meet before",
    "everything.kind": "a name that does not exist, in a case that does not occur: all messages have one shape",
    "self.latest.number + 2": "generations differ, and grow",
    "host[1] for host in comm.hosts": "another rank of the host makes the memory",
    "!= first or path": "the first rank maps its own memory once more",
    "(bucket), begin - last": "counts from the end, and finds the same place",
    "like = bucket.slots[1]": "the parameters of a bucket have one type and one device",
    "like = bucket.slots[-1]": "the same",
}
ELSEWHERE = {  # what a line is about, if that is not what its chapter is about
    "check_fits(": "refuses another model",
    "check_optimizer(": "refuses another optimizer",
    "_groups_to_add(": "groups that callbacks had added, and other groups",
    "state.rates = ": "rates that a callback has changed",
    "requires_grad_(": "parameters that a callback had frozen or not",
    "group.update(": "another rate than that of the checkpoint",
    "changed": "warns of other settings",
    "evaluated_at": "checkpoints of the first version",
    "choices": "which way an all-reduce took",
    "gradient_order": "the order of buckets, on which only the bits of three ranks and more depend",
    "random_state": "random numbers that do not follow from the position",
    "self._kept.clear()": "parameters without a gradient",
    "sync_buffers": "buffers",
    "pieces[0].bench.leaves[half], flat": "tensors of a few bytes",
    "refuse_if_broken": "what comes after an error",
    "envelope.direction == 'from'": "tensors that are not laid out in one piece",
    "must agree in dtype": "an exercise",
    "consumed == 0": "saves at the end of an epoch",
    "parcel.is_dense": "tensors that are sent as they are",
    "super().enter": "hooks inside of others",
    "words = ": "what an error says",
    "most = world_size": "refuses variables that contradict",
    "not 0 < port": "refuses a port",
    "_velocity": "momentum",
    "tail = ": "how much of the log is shown",
    "has_ratio = ": "tensors of zeros",
    "weight_decay * weight_norms": "weight decay in the ratio",
    "momenta, alpha=momentum": "Nesterov's momentum",
    "num_joined": "a count for the report",
    "memory.forget()": "takes away the name of memory that is mapped",
    "mmap.mmap(-1": "ranks that cannot share memory",
    "not in summed": "micro-batches",
    "_check_unwritten": "refuses writes",
    "_without_gradients": "memory that is freed after an update",
    "_units.release_of(": "what is whole until backward ends",
}
SUBJECTS = {  # chapter → the functions that it is about
    "01_send_and_receive": [
        "comm/communicator.py: post, wait_for, wait, add",
        "comm/watch/status.py: stuck, _deadlock",
    ],
    "02_ring": ["collectives/ring.py: reduce_scatter, all_gather, all_reduce"],
    "03_trees": [
        "collectives/tree.py: reduce, broadcast, distances",
        "collectives/butterfly.py: doubling",
        "collectives/master_worker.py: reduce, broadcast",
    ],
    "04_costs": ["collectives/cost.py: tree, recursive_doubling, circulant, bandwidth_optimal_s, textbook"],
    "05_shared_memory": ["comm/host_reduce.py: all_reduce, _hand_in, _add_copies, _new_blocks, _cuts"],
    "06_naive_replicas": ["replica/naive.py: _finish", "replica/broadcast.py: broadcast_tensors"],
    "07_buckets": [
        "replica/backward.py: begin, _set_up, note, _launch_if_full, _launch_full, end, finish",
        "replica/step_finalizer.py: settle",
        "replica/step_finalizer.py: complete",
        "gradients/bucket.py: views_of, fill",
    ],
    "08_who_gets_which_sample": [
        "data/orders/sampler.py: parts, _plans_from",
        "data/orders/distributed_sampler.py: EvaluationSampler.__init__, num_samples, total_size, _order",
    ],
    "09_accumulation": ["data/orders/sampler.py: parts", "replica/replica.py: no_sync, ride_along"],
    "10_a_worker_dies": [
        "train/checkpoints/checkpoint.py: save_checkpoint, restore, step_end",
        "train/steps/state.py: load_position",
        "comm/transport/shared_memory.py: ProcessHandle.__init__, is_running",
        "run/launch/failures.py: describe_failures, _aside, _death",
    ],
    "12_large_batches": [
        "optim/trust_ratio.py: trust_ratios",
        "optim/trust_ratio.py: LARS._measure, LARS._apply",
        "optim/layerwise.py: parameter_groups",
    ],
    "13_less_traffic": [
        "gradients/hook.py: commit, add_to, ErrorFeedback.enter",
        "gradients/hooks.py: encode_signs, add_signs",
        "gradients/hooks.py: TopK.reduce",
    ],
    "14_every_sample_once": [
        "data/orders/sharding.py: Lanes.__init__, Lanes.samples",
        "data/orders/sharding.py: _equal_lanes",
        "data/orders/order.py: Blocks.samples, Checksum.of",
    ],
    "15_who_starts_it": ["comm/meeting/place.py: _placed, _on_one_host, _port_of, _starter"],
    "16_central_storage": ["strategies/host_store.py: shared_by_host, _mapped"],
    "20_sums_and_their_order": ["collectives/shards.py: shards_of_rank, halves, largest_nodes, additions"],
    "21_workers_come_and_go": [
        "comm/meeting/membership.py: Membership._change, is_superseded, Member.look",
        "comm/session.py: init_again",
    ],
    "22_pipelines": ["collectives/pipelines.py: gpipe, one_forward_one_backward"],
    "23_slices_of_a_layer": ["comm/verbs.py: all_reduce_in_graph"],
    "24_a_model_in_shares": [
        "replica/flat.py: Flat.__init__, Flat._taken",
        "replica/in_slices.py: InSlices.fill",
        "strategies/fully_sharded.py: UnitSlices.__init__, UnitSlices.take_in",
    ],
}


class Mutant(NamedTuple):
    """A file of the package, its changed source, and the line that was changed, before and after."""

    file: str
    source: str
    before: str
    after: str


def mutants_of(subject: str) -> Iterator[Mutant]:
    """Yields everything that differs in one spot of one of the named functions."""
    file, _, names = subject.partition(": ")
    original = (ROOT / "ddp" / file).read_text()
    for name in names.split(", "):
        for spot in range(len(changes(function_in(ast.parse(original), name)))):
            tree = ast.parse(original)
            function = function_in(tree, name)
            before = ast.unparse(tree).splitlines()
            changes(function)[spot]()
            changed = ast.unparse(tree)
            line = next(pair for pair in zip(before, changed.splitlines(), strict=False) if pair[0] != pair[1])
            if not any(same in line[1] for same in SAME) and not any(other in line[0] for other in ELSEWHERE):
                yield Mutant(file, changed, line[0].strip(), line[1].strip())


class _Bare(ast.NodeTransformer):
    """Takes away whatever does nothing in a program that is right: annotations, and `strict` of a zip."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.generic_visit(ast.Assign([node.target], node.value) if node.value else node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        return self.generic_visit(node)


def function_in(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        tree = next(node for node in ast.walk(tree) if getattr(node, "name", None) == part)
    return ast.fix_missing_locations(_Bare().visit(tree))


def survives(chapter: str, mutant: Mutant) -> bool:
    """Returns True if the chapter ends well with a library that has this mutant."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "ddp", Path(folder) / "ddp", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "ddp" / mutant.file).write_text(mutant.source)
        environment = {**os.environ, "PYTHONPATH": folder}
        words = [sys.executable, str(ROOT / "recipes" / "tutorial" / f"{chapter}.py")]
        try:
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> None:
    """Prints, by chapter, how many mutants were noticed, and which were not."""
    for chapter in sys.argv[1:] or SUBJECTS:
        found = [mutant for subject in SUBJECTS[chapter] for mutant in mutants_of(subject)]
        chosen = [found[number * len(found) // NUM_MUTANTS] for number in range(NUM_MUTANTS)] if found else []
        with ThreadPoolExecutor(2) as pool:
            survived = list(pool.map(lambda mutant: survives(chapter, mutant), chosen))  # noqa: B023
        print(f"{chapter}: {survived.count(False)} of {len(chosen)} noticed", flush=True)
        for mutant, survivor in zip(chosen, survived, strict=True):
            if survivor:
                print(f"    {mutant.file}: {mutant.before}\n        became {mutant.after}", flush=True)


if __name__ == "__main__":
    main()
