"""Runs each chapter against libraries with one thing wrong, and counts how often its assertions notice.

    .venv/bin/python tests/tutorial/chapter_mutants.py [CHAPTER …]     ten mutants of each chapter's subject; minutes

A mutant is a copy of the package in which one spot of one function is changed (tests/collectives/mutants.py).
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
sys.path.insert(0, str(ROOT / "tests" / "collectives"))

from mutants import changes  # noqa: E402

NUM_MUTANTS, LIMIT_S = 10, 90
SUBJECTS = {  # chapter → the functions that it is about
    "02_ring": ["collectives/ring.py: reduce_scatter, all_gather, all_reduce"],
    "03_trees": [
        "collectives/tree.py: reduce, broadcast, distances",
        "collectives/butterfly.py: doubling",
        "collectives/master_worker.py: reduce, broadcast",
    ],
    "04_costs": ["collectives/cost.py: ring, tree, recursive_doubling, textbook"],
    "05_shared_memory": ["comm/host_reduce.py: all_reduce, _hand_in, _add_copies, _blocks, _cuts"],
    "06_naive_replicas": ["replica/naive.py: _average", "replica/broadcast.py: broadcast_tensors"],
    "07_buckets": ["replica/backward.py: begin, note, _launch_if_full, _launch_full, _fill, _launch, finish"],
    "08_who_gets_which_sample": [
        "data/sampler.py: _micros, _plans_from, EvaluationSampler.__init__",
        "data/distributed_sampler.py: num_samples, total_size, _order",
    ],
    "09_accumulation": ["data/sampler.py: _micros", "replica/replica.py: no_sync, ride_along, _take_totals"],
    "10_a_worker_dies": ["train/state.py: position, load_position", "train/checkpoint.py: restore"],
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
        for spot in range(len(changes(_function(ast.parse(original), name)))):
            tree = ast.parse(original)
            before = ast.unparse(tree).splitlines()
            changes(_function(tree, name))[spot]()
            changed = ast.unparse(tree)
            line = next(pair for pair in zip(before, changed.splitlines(), strict=False) if pair[0] != pair[1])
            yield Mutant(file, changed, line[0].strip(), line[1].strip())


def _function(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        tree = next(node for node in ast.walk(tree) if getattr(node, "name", None) == part)
    return tree


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
