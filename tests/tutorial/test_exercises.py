"""The exercises: cut from the library as it is, and checks that find out what a reader may do wrong.

Tests: ddp/lab/clone.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
from forked import run_program
from mutants import Mutant, mutants, mutated
from ranks import run_ranks

from ddp.__main__ import main
from ddp.collectives import Recv, Round, Send
from ddp.collectives.catalog import SCHEDULES, own_all_reduce
from ddp.collectives.schedule import Goal, Schedule
from recipes.tutorial.tools import (
    exercise,
    gradient_checks,
    judged_by_tests,
    own_schedule,
    own_training,
    schedule_checks,
)
from recipes.tutorial.tools import holes as tool
from recipes.tutorial.tools.holes import LIBRARY, SOURCES, cut, holes, name_of
from recipes.tutorial.tools.mistake import Mistake
from recipes.tutorial.tools.own_schedule import open_exercise

sys.path.append(str(Path(__file__).parents[1] / "data" / "orders"))
import test_sampler

# The same checks, with fewer ranks: most mistakes show with two. (Tests judge 08.)
QUICK: dict[str, Callable[[ModuleType], Iterator[str]]] = {
    "02": partial(schedule_checks.ring, sizes=(1, 2, 3, 4)),
    "03": partial(schedule_checks.butterfly, sizes=(1, 2, 3, 4)),
    "06": partial(gradient_checks.naive, sizes=(2,)),
    "07": partial(gradient_checks.buckets, sizes=(2,)),
}


def solution(number: str) -> ModuleType:
    return exercise.loaded(LIBRARY / SOURCES[number], number)


def verdict(number: str, module: ModuleType) -> str:
    """Returns the mistake that the check finds, or an empty text."""
    try:
        with exercise.in_place_of_the_library(module, number):
            list(QUICK[number](module))
    except Mistake as mistake:
        return str(mistake)
    return ""


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SOURCES)
def test_a_file_is_the_library_as_it_is_but_for_the_holes(number: str) -> None:
    library = (LIBRARY / SOURCES[number]).read_text(encoding="utf-8")
    kept, cut_out = set(cut(number).splitlines()), sum(hole.stop - hole.first for hole in holes(number))
    assert 5 <= cut_out <= 12  # about ten lines
    assert len([line for line in library.splitlines() if line not in kept]) <= cut_out + 1  # one opens the docstring


def test_there_is_a_check_for_every_file() -> None:
    assert set(exercise.CHECKS) == {*SOURCES, *exercise.PROGRAMS} and set(SOURCES) == {*QUICK, "08"}
    assert set(exercise.PROGRAMS) == {path.stem for path in exercise.BEGINNINGS.glob("*.py")}


@pytest.mark.parametrize("number", QUICK)
def test_a_hole_is_not_written_yet(number: str, tmp_path: Path) -> None:
    path = tmp_path / name_of(number)
    path.write_text(cut(number), encoding="utf-8")
    found = verdict(number, exercise.loaded(path, number))
    assert found.startswith("not written yet: ")
    assert f"{name_of(number)}, line " in found and "raise NotImplementedError(" in found


@pytest.mark.parametrize("number", QUICK)
@pytest.mark.quick(1)
def test_the_library_is_right(number: str) -> None:
    module = solution(number)
    with exercise.in_place_of_the_library(module, number):
        assert len(list(exercise.CHECKS[number](module))) >= 2


# --- what is wrong ---------------------------------------------------------------------------------------------------


def hole_mutants(number: str, module: ModuleType) -> Iterator[tuple[FunctionType, Mutant]]:
    """Yields every function with one thing wrong in its hole."""
    lines = (LIBRARY / SOURCES[number]).read_text(encoding="utf-8").splitlines()
    for hole in holes(number):
        found: Any = module
        for part in hole.function.split("."):
            found = getattr(found, part)
        function = inspect.unwrap(found)
        block = ast.unparse(ast.parse(textwrap.dedent("\n".join(lines[hole.first : hole.stop]))))
        inside = {line.strip() for line in block.splitlines()}
        yield from ((function, mutant) for mutant in mutants(function) if mutant.before in inside)


SAME = {  # a part of what a line becomes, and why that is right all the same
    "03": {"if rank <= peer": "never are they equal"},
}


@pytest.mark.parametrize("number", QUICK)
@pytest.mark.quick(1)
def test_every_one_line_mutant_is_found_out(number: str) -> None:
    module, survivors, count = solution(number), list[str](), 0
    for function, mutant in hole_mutants(number, module):
        count += 1
        with mutated(function, mutant):
            if not verdict(number, module):
                survivors.append(mutant.after)
    known = SAME.get(number, {})
    assert [line for line in survivors if not any(part in line for part in known)] == []
    assert [part for part in known if not any(part in line for line in survivors)] == []
    assert count >= 2


class Typical(NamedTuple):
    """A mistake that a reader may make: lines of the solution, what stands there instead, and what must be said."""

    number: str
    right: str
    wrong: str
    says: str


REDUCE = "                    self.comm.all_reduce(gradient, label=name)\n"
ASSIGN = "                parameter.grad = gradient.div_(divisor)\n"
FILL_AND_LAUNCH = "            self._fill(reduction)\n            self.launch(reduction)\n"
IS_LAST = "reduction.bucket is self.layout.flags.carrier"
UNTIL_FULL = f"            if {IS_LAST} or not reduction.is_full:\n                return\n"
TYPICAL = {
    "ring: off by one chunk": Typical(
        "02",
        "(rank - 1 - step) % num_ranks, (rank - 2 - step) % num_ranks",
        "(rank - step) % num_ranks, (rank - 1 - step) % num_ranks",
        "reduce_scatter with 2 ranks: rank 0 at the end: chunk 0 ends as 0: not each contribution once, that of rank 1 "
        "is missing\nhint: `python -m ddp draw ring_reduce_scatter 2` shows every round of the library's",
    ),
    "ring: wrong neighbour": Typical(
        "02",
        "yield Send(right,",
        "yield Send(left,",
        "reduce_scatter with 3 ranks: rank 0 in round 1: deadlock: rank 2 sends no chunk 1 in this round\n"
        "hint: `python -m ddp draw ring_reduce_scatter 3` shows",
    ),
    "ring: overwriting": Typical("02", "add=True)", "add=False)", "chunk 0 ends as 1: not each contribution once"),
    "ring: adding what is complete": Typical("02", "add=False)", "add=True)", "adds to chunk 1, which is undef"),
    "ring: no receive": Typical(
        "02",
        ", Recv(left, range(incoming, incoming + 1), add=True)",
        ",",
        "deadlock: rank 1 receives no chunk 1 in this round\n",
    ),
    "ring: a round too few": Typical("02", "(num_ranks - 1):", "(num_ranks - 2):", "no rank sends this chunk"),
    "ring: everything each time": Typical(
        "02",
        "yield Send(right, range(outgoing, outgoing + 1)), Recv(left, range(incoming, incoming + 1), add=True)",
        "yield Send(right, range(num_ranks)), Recv(left, range(num_ranks), add=True)",
        "reduce_scatter with 2 ranks: the sums are right, but chunks sent by a rank: 2, where 1 is enough\n",
    ),
    "ring: aliasing": Typical(
        "02",
        "(rank - step) % num_ranks, (rank - 1 - step) % num_ranks",
        "(rank - step) % num_ranks, (rank - step) % num_ranks",
        "all_gather with 2 ranks: rank 0 in round 1: a chunk is overwritten while in use",
    ),
    "ring: no range": Typical("02", "Send(right, range(outgoing, outgoing + 1))", "Send(right, outgoing)", "a range"),
    "ring: an error": Typical(
        "02", "(num_ranks - 1):", "(num_ranks - one):", "NameError: name 'one' is not defined\n  "
    ),
    "butterfly: the farthest first": Typical(
        "03",
        "    while distance < num_ranks:\n        peer, half = rank ^ distance, len(mine) // 2\n",
        "    while distance < num_ranks:\n        peer, half = rank ^ (num_ranks // 2 // distance), len(mine) // 2\n",
        "hint: farthest first: begin with the partner at distance 1",
    ),
    "butterfly: wrong neighbour": Typical(
        "03",
        "rank ^ distance",
        "(rank + distance) % num_ranks",
        "deadlock: rank 1 sends no chunks 0-1 in this round\nhint: `python -m ddp draw butterfly 4`",
    ),
    "butterfly: both keep the same half": Typical(
        "03", " if rank < peer else (mine[half:], mine[:half])", "", "expects chunk 0, rank 1 sends chunk 1\n"
    ),
    "butterfly: forth once more": Typical(
        "03",
        "in reversed(exchanges)",
        "in exchanges",
        "halving_doubling with 4 ranks: rank 3 at the end: chunk 0 ends as (2, 3), but as ((0, 1), (2, 3)) on rank 0",
    ),
    "butterfly: not back": Typical(
        "03",
        "in reversed(exchanges)",
        "in []",
        "halving_doubling with 2 ranks: rank 1 at the end: chunk 0 ends as 1, but as (0, 1) on rank 0",
    ),
    "naive: sum in place of mean": Typical("06", ".div_(divisor)", "", "hint: a sum in place of a mean"),
    "naive: divided twice": Typical("06", ".div_(divisor)", ".div_(divisor).div_(divisor)", "hint: divided twice"),
    "naive: own gradient": Typical("06", REDUCE + ASSIGN, "                    pass\n", "hint: nothing was reduced: "),
    "naive: a copy is reduced": Typical(
        "06", "all_reduce(gradient,", "all_reduce(gradient.clone(),", "hint: nothing was reduced, but it was divided"
    ),
    "naive: missing wait": Typical(
        "06", "label=name)", "label=name, async_op=True)", "missing wait: nobody on rank 0 waits for the all-reduce of "
    ),
    "naive: aliasing": Typical(
        "06",
        "parameter.grad = gradient.div_(divisor)",
        "self.__dict__.setdefault('flat', gradient.new_empty(25))\n"
        "                flat = self.flat[: gradient.numel()].view_as(gradient)\n"
        "                parameter.grad = flat.copy_(gradient.div_(divisor))",
        "aliasing: two gradients share memory",
    ),
    "naive: who has no gradient stays away": Typical(
        "06",
        "            if anyone:\n",
        "            if parameter.grad is not None:\n",
        "a branch that rank 1 alone takes: ranks call different collectives.",
    ),
    "naive: who has no gradient gets none": Typical(
        "06",
        ASSIGN,
        "                gradient.div_(divisor)\n",
        "rank 0, gradient of right.weight: found None, expected [",
    ),
    "naive: mean of means": Typical(
        "06",
        REDUCE + ASSIGN,
        '                    self.comm.all_reduce(gradient.div_(mine.num_items if mine else 1), "mean", label=name)\n'
        "                parameter.grad = gradient\n",
        "hint: a mean of the ranks' means",
    ),
    "naive: rank 0 alone": Typical(
        "06",
        "            if anyone:\n",
        "            if anyone and self.comm.rank == 0:\n",
        "2 ranks: ranks call different collectives.",
    ),
    "naive: gradients that nobody has": Typical(
        "06", "            if anyone:\n", "            if True:\n", "right.weight: found one, expected None"
    ),
    "naive: the number of ranks": Typical(
        "06",
        "div_(divisor)",
        "div_(self.comm.world_size)",
        "hint: divided by the number of ranks, not by the number of ",
    ),
    "buckets: before it is full": Typical(
        "07", UNTIL_FULL, f"            if {IS_LAST}:\n                return\n", "got a gradient in step 2 after"
    ),
    "buckets: all at the end": Typical("07", ">= reduction.check_at", "> reduction.check_at", "launched: no bucket"),
    "buckets: another order": Typical(
        "07",
        UNTIL_FULL,
        f"            if {IS_LAST} or reduction.is_launched or not reduction.is_full:\n                continue\n",
        "ranks call different collectives.",
    ),
    "buckets: one at a time": Typical(
        "07",
        FILL_AND_LAUNCH,
        FILL_AND_LAUNCH + "            return\n",
        "launched: bucket 1 (1 gradients: right.weight); expected: bucket 1 (1 gradients: right.weight), bucket 2",
    ),
    "buckets: flags too early": Typical("07", f"if {IS_LAST} or not", "if not", "stem.weight: launched: bucket 3"),
    "buckets: aliasing": Typical(
        "07", FILL_AND_LAUNCH, "            self.launch(reduction)\n", "hint: the last step's mean was reduced again"
    ),
    "buckets: twice": Typical(
        "07", "self.reductions[self._num_launched :]:\n", "self.reductions:\n", "launched: bucket 0 (3 gradients"
    ),
    "buckets: no answer": Typical(
        "07", "        return True\n\n    def note_other", "\n    def note_other", "returned None"
    ),
}


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.quick(3)
def test_a_typical_mistake_is_named(name: str, tmp_path: Path) -> None:
    number, right, wrong, says = TYPICAL[name]
    text = (LIBRARY / SOURCES[number]).read_text(encoding="utf-8")
    assert right in text, "the library has changed"
    path = tmp_path / name_of(number)
    path.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    with pytest.raises(Mistake) as found:
        list(exercise.check(number, path, QUICK[number]))
    assert says in str(found.value)
    others = {other.says for other in TYPICAL.values() if other.number == number} - {says}
    assert [other for other in others if other in str(found.value)] == []


# --- what tests judge -------------------------------------------------------------------------------------------------


def test_the_tests_that_judge_find_out_every_one_line_mutant() -> None:
    """The three tests, with the numbers that matter, in the place of many that hypothesis draws."""
    each_sample, shares, parts = (
        getattr(test_sampler, proof.test.partition("::")[2]) for proof in judged_by_tests.SAMPLER
    )

    def finds_out() -> bool:
        try:
            for world_size in (1, 2, 3):
                each_sample(world_size, 5, False)
                for more, extra, micro_size in product((1, 2), (0, 3), (1, 2)):
                    shares.hypothesis.inner_test(world_size, more, extra, micro_size)
                    parts.hypothesis.inner_test(world_size, more, extra, micro_size)
        except Exception:
            return True
        return False

    assert not finds_out()
    survivors, count = list[str](), 0
    for function, mutant in hole_mutants("08", importlib.import_module("ddp.data.orders.sampler")):
        count += 1
        with mutated(function, mutant):
            if not finds_out():
                survivors.append(mutant.after)
    assert [line for line in survivors if "max(2, len(mine))" not in line] == []  # a shard of one sample is one part
    assert count >= 5


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("", "", "✗ not written yet: parts\n  08_sampler.py, line "),
        (
            "num_parts = math.ceil(",
            "num_parts = int(",
            "✓ 1 to 8 ranks: every sample of a step is on one rank, once\n"
            "✗ shares differ by one sample at most, and shards are cut into as few parts as can be",
        ),
    ],
)
@pytest.mark.quick(1)
def test_a_test_says_what_is_wrong(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    text = (LIBRARY / SOURCES["08"]).read_text(encoding="utf-8") if right else cut("08")
    assert right in text, "the library has changed"
    folder, command = tmp_path / "folder", tmp_path / "command.py"
    folder.mkdir()
    (folder / name_of("08")).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    command.write_text('import sys\nfrom ddp.__main__ import main\nsys.exit(main(["exercise", "08"]))\n')
    done = run_program(command, folder)  # a process of its own, because pytest runs pytest
    assert done.returncode == 1 and done.stdout.startswith(f"08_sampler.py\n{says}") and not done.stderr
    assert not right or "\nhint: part i of n begins at" in done.stdout
    assert [path.name for path in folder.iterdir()] == [name_of("08")]


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Returns the exit status of `python -m ddp exercise`, and what it prints."""
    try:
        status = main(["exercise", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_a_reader_s_work_is_not_overwritten_and_a_file_in_this_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (tool, exercise):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "exercises")
    monkeypatch.chdir(tmp_path)
    status, text = run(capsys, "02", "--begin")
    assert status == 0 and text.startswith("exercises/02_ring.py: write what is missing there")
    assert Path("exercises/02_ring.py").read_text() == cut("02")
    status, text = run(capsys, "02", "--begin")
    assert status == 2 and "exercises/02_ring.py is there already, and may hold work of yours: go on with it" in text
    status, text = run(capsys, "02")
    assert status == 1 and "✗ not written yet: reduce_scatter" in text
    shutil.copy(LIBRARY / SOURCES["02"], "02_ring.py")
    status, text = run(capsys, "2")
    assert (status, text.splitlines()[0]) == (0, "02_ring.py")
    assert text.endswith("solved; the library has it in ddp/collectives/ring.py\n")
    assert text == run(capsys, "02", "02_ring.py")[1]


RECURSION = "  mine.py, line 1: def f(): f()\n"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(:\n", "✗ mine.py, line 1: invalid syntax"),
        ("x = 1\nx.y\n", "✗ mine.py: AttributeError: 'int' object has no attribute 'y'\n  mine.py, line 2: x.y\n"),
        ("x = 1\n", "✗ mine.py: there is no reduce_scatter in it any more\nhint: start from a fresh copy"),
        (
            "def reduce_scatter(rank, num_ranks): return []\ndef all_gather(rank, num_ranks): return []\n",
            "✗ reduce_scatter: is no generator\nhint: a schedule yields its rounds",
        ),
        (
            "def reduce_scatter(rank, num_ranks):\n    while True:\n        yield ()\ndef all_gather(): 0\n",
            "reduce_scatter with 1 rank: rank 0 in round 10011: never ends; a schedule must end",
        ),
        (
            "import sys\ndef reduce_scatter(rank, num_ranks):\n    sys.exit(0)\n    yield\ndef all_gather(): 0\n",
            "✗ the solution calls sys.exit(0): return instead",
        ),
        ("x = '\0'\n", "✗ mine.py: source code string cannot contain null bytes"),
        ("def f(): f()\nf()\n", f"line 2: f()\n{4 * RECURSION}  …\n{5 * RECURSION}"),
    ],
)
def test_a_file_that_does_not_get_far(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code)
    status, text = run(capsys, "02", "mine.py")
    assert status == 1 and says in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("11", "there is no exercise 11; there are 02, 03, 06, 07, 08, precision, memory, bottleneck, `schedule` "),
        ("ring", "there is no exercise ring; there are 02, "),
        ("02 nowhere.py", "there is no file nowhere.py: `python -m ddp exercise 02 --begin` writes the one to begin"),
        ("schedule", "schedule '': give the address of an all-reduce of yours, e.g. my_module:chain"),
        ("schedule mine", "schedule 'mine': give the address of an all-reduce of yours, e.g. my_module:chain"),
        ("cluster mine", "cluster 'mine': give the address of a training of yours, e.g. my_model:train"),
        ("mirrored nowhere:train", "mirrored=nowhere:train: there is no module nowhere"),
    ],
)
def test_bad_input(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, *words.split())
    assert status == 2 and says in text


def test_an_endless_loop_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "endless.py"
    path.write_text("import sys\nwhile sys.ended is None:\n    pass\n")
    monkeypatch.setattr(sys, "ended", None, raising=False)
    monkeypatch.setattr(os, "_exit", partial(setattr, sys, "ended"))

    def lines() -> Iterator[str]:
        exec(compile(path.read_text(), path, "exec"))
        yield "ended"

    assert list(exercise.ended_by_deadline(lines(), path, seconds=0.1)) == ["✓ ended"]
    assert sys.ended == 1  # type: ignore[attr-defined]
    text = capsys.readouterr().out
    assert "✗ still running after 0.1 s; a loop may never end" in text and "endless.py, line " in text


def test_a_schedule_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_schedule.MOST_PROVEN == 64
    monkeypatch.setattr(own_schedule, "MOST_PROVEN", 12)
    monkeypatch.setattr(own_schedule, "TRAINED", 2)
    shutil.copy(Path(__file__).parent.parent / "mine.py", "own_chain.py")
    status, text = run(capsys, "schedule", "own_chain:chain")
    assert status == 0
    assert "✓ proven for 1 to 12 ranks" in text
    assert "2 workers: the replicas are equal bit by bit, and the loss fell from " in text
    assert text.endswith("train with it: python -m ddp train comm.algorithm=own_chain:chain\n")
    for next_one in ("draw own_chain:chain 4 --svg chain.svg", "simulate own_chain:chain 100"):
        assert f": python -m ddp {next_one}\n" in text and main(next_one.split()) == 0
    capsys.readouterr()

    half = Path("own_chain.py").read_text().partition("    for step in range(last, 0, -1)")[0]
    Path("own_half.py").write_text(half)
    status, text = run(capsys, "schedule", "own_half:chain")
    assert status == 1
    assert text == (
        "✗ with 2 ranks: rank 0 at the end: chunk 0 ends as 0: not each contribution once, that of rank 1 is missing\n"
    )


def whole_or(other: Schedule, *, above: int) -> Schedule:
    """Returns a tree that is something else with more ranks."""

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        return (SCHEDULES["tree"] if num_ranks <= above else other).algorithm(rank, num_ranks)

    def num_chunks(num_ranks: int) -> int:
        return SCHEDULES["tree"].num_chunks(num_ranks) if num_ranks <= above else other.num_chunks(num_ranks)

    return own_all_reduce(Schedule(algorithm, Goal.ALL_REDUCE, num_chunks))


TREE = SCHEDULES["tree"]


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (SCHEDULES["tree_broadcast"], "is not an all-reduce: its goal is that rank 0 starts with every chunk"),
        (whole_or(TREE._replace(num_chunks=lambda n: 1 // (n - 7)), above=6), "with 7 ranks: ZeroDivisionError"),
        (whole_or(TREE._replace(num_chunks=lambda n: 1 << 40), above=6), "with 7 ranks: num_chunks is 1099511627776"),
        (whole_or(TREE._replace(algorithm=lambda *_: iter(())), above=6), "no rank sends this chunk"),
        (whole_or(SCHEDULES["tree_broadcast"], above=6), "not each contribution once"),
    ],
)
def test_a_wrong_schedule_is_refused_also_if_it_is_right_for_few_ranks(schedule: Schedule, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        list(open_exercise("x:y", schedule, sys.modules[__name__]))


def test_the_first_all_reduce_that_a_reader_writes_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sends everything to every other one, and adds in the order of the ranks."""

    def naive(rank: int, num_ranks: int) -> Iterator[Round]:
        others, everything = [peer for peer in range(num_ranks) if peer != rank], range(num_ranks)
        sends = [Send(peer, everything) for peer in others]
        yield (*sends, *(Recv(peer, everything, add=True, before=peer < rank) for peer in others))

    monkeypatch.setattr(own_schedule, "launch", lambda *_, **__: [[1.0, 0.5]])
    monkeypatch.setattr(own_schedule, "MOST_PROVEN", 16)
    assert len(list(open_exercise("x:naive", own_all_reduce(naive), sys.modules[__name__]))) == 2


# --- a training of one's own ------------------------------------------------------------------------------------------

TRAINING = """
import os
import torch
import ddp

def train():
    torch.manual_seed(0)
    size = int(os.environ["WORLD_SIZE"])
    points = torch.randn(200, 2)
    inside = (points.norm(dim=1) < 1).long()
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    loss = torch.nn.functional.cross_entropy
    ddp.fit(model, (points, inside), adam, loss=loss, global_batch=50, epochs=3, strategy="mirrored", folder=None)
"""


@pytest.fixture
def quick_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers are forked, and there are no virtual hosts; returns the reader's folder."""

    def on_workers(name: str, workers: int, *, are_hosts: bool = False) -> list[own_training.Found]:
        words = name, str(tmp_path), str(tmp_path), are_hosts
        return own_training._whole(run_ranks(own_training.as_rank, workers, *words))

    monkeypatch.setattr(own_training, "_on_workers", on_workers)
    monkeypatch.setattr(own_training, "BED", tmp_path / "hosts.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_training_of_one_s_own_is_right(quick_workers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (quick_workers / "right_here.py").write_text(TRAINING)
    (quick_workers / "right_there.py").write_text(TRAINING.replace("mirrored", "multi_worker"))
    status, text = run(capsys, "mirrored", "right_here:train")
    lines = [line for line in text.splitlines() if line.startswith("✓")]
    assert (
        status == 0
        and len(lines) == 5
        and lines[3] == ("✓ two workers of one host: the replicas are equal, bit by bit")
    )
    status, text = run(capsys, "cluster", "right_there:train")
    assert status == 0 and "✓ two workers, each as on a host of its own: the mathematics of one process" in text


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (', strategy="mirrored"', "", "the strategy: found 'auto', expected 'mirrored'"),
        ("ddp.fit(", "print(", "the training runs: TypeError: "),
        ("    ddp.fit(", "    return\n    ddp.fit(", "it has not called ddp.fit"),
        ("torch.manual_seed(0)", "torch.seed()", "it begins with other weights\nhint: torch.manual_seed(0)"),
        ("lr=0.02", "lr=30.0", "the model learns: the loss went from "),
        ("global_batch=50", "global_batch=50 * size", "6 steps, where one worker makes 12\nhint: global_batch counts"),
        ("(points, inside)", "(points[::size], inside[::size])", "give every worker all data"),
        ("torch.nn.ReLU()", "torch.nn.BatchNorm1d(16), torch.nn.ReLU()", "hint: BatchNorm normalises over"),
        ("lr=0.02", "lr=0.02 * size", "of the way from those of one worker\nhint: do the data, the rate or the loss"),
    ],
)
@pytest.mark.quick(2)
def test_a_mistake_in_a_training_is_named(
    right: str, wrong: str, says: str, quick_workers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"wrong_{abs(hash((right, wrong)))}"
    assert right in TRAINING
    (quick_workers / f"{name}.py").write_text(TRAINING.replace(right, wrong, 1))
    status, text = run(capsys, "mirrored", f"{name}:train")
    assert status == 1 and says in text and "Traceback" not in text
