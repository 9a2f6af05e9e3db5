"""Checks exercise bottleneck: is it found, and is the program faster now, with the same numbers?

The program looks slow in five places, and a seed draws the one that is. The judge makes the program again from its
seed, runs it on two workers, with a profile, and then the reader's. The slow part is always a loop, so faster is a step
with fewer calls of functions, Python's and torch's, which a busy machine does not change. Numbers are compared bit by
bit.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from random import Random
from statistics import median
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ddp
from ddp.errors import WorkersFailed
from ddp.run.launch.from_python import launch
from ddp.train.reports.profile import PARTS, Part, Profile, read_profile
from recipes.tutorial.tools.mistake import Mistake, in_words, raise_first

PROGRAM = Path(__file__).parent.parent / "programs" / "bottleneck.py"
# Sizes in the program: some that cost little, some that make it slow, and the part of the step that they are in.
SIZES: dict[str, tuple[Sequence[int], Sequence[int], Part]] = {
    "LOOKED_AT": (range(1, 4), range(120, 160), "data"),
    "TERMS": (range(15, 30), range(1500, 1800), "forward"),
    "GROUP": (range(32, 65), (1,), "communication"),
    "PIECE": (range(512, 1024), (3, 4), "update"),
    "LOGGED": ((512, 1024), (4,), "forward"),  # on one rank, the WATCHER
}
NUM_RANKS, NUM_STEPS, LIMIT_S = 2, 10, 100  # of the steps, five warm up, and five are profiled
COUNTED, FASTER = 4, 0.6  # the step whose calls are counted; the share of them that may be left
RUNS, FOUND, MENDED = "the training runs", "what is slow", "the training once it is mended"


class Drawn(NamedTuple):
    """Says what a seed has drawn.

    Attributes:
        sizes: by name.
        part: of the step that is slow; rank: that is slow there, None for all of them.
    """

    sizes: dict[str, int]
    part: Part
    rank: int | None


class Found(NamedTuple):
    """Tells how a training went on one rank.

    Attributes:
        mistake: arguments of `Mistake`; () for none. All else is empty then.
        losses: of each step; weights: at the end, flat; written: what the program has returned.
        num_calls: calls of functions in a step.
    """

    mistake: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    weights: Tensor = torch.empty(0)
    written: Any = None
    num_calls: int = 0


def drawn(seed: int) -> Drawn:
    """Returns what a seed draws."""
    numbers = Random(seed)
    slow, watcher = numbers.choice(list(SIZES)), numbers.randrange(NUM_RANKS)
    sizes = {name: numbers.choice(much if name == slow else little) for name, (little, much, _) in SIZES.items()}
    return Drawn({**sizes, "WATCHER": watcher}, SIZES[slow][2], watcher if slow == "LOGGED" else None)


def text_of(seed: int) -> str:
    """Returns the program that a seed draws."""
    sizes = drawn(seed).sizes
    text = re.sub("^SEED = .*$", f"SEED = {seed}", PROGRAM.read_text(encoding="utf-8"), flags=re.MULTILINE)
    line = f"{', '.join(sizes)} = {', '.join(map(str, sizes.values()))}"
    return re.sub(f"^{', '.join(sizes)} = .*$", line, text, flags=re.MULTILINE)


def bottleneck(module: ModuleType) -> Iterator[str]:
    """Checks exercise bottleneck."""
    part, seed = getattr(module, "PART", None), getattr(module, "SEED", None)
    if part not in PARTS:
        hint = f"write the part of the step that is slow, one of {', '.join(PARTS)}; `draw step` shows them all"
        raise Mistake(FOUND, f"PART is {part!r}", hint)
    if not isinstance(seed, int):
        raise Mistake(FOUND, f"SEED is {seed!r}", "leave the number that --begin has drawn")
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder) / "slow.py"
        original.write_text(text_of(seed), encoding="utf-8")
        ranks = _run([original, Path(module.__file__ or "").absolute()], Path(folder))
        slow, mended = ([programs[number] for programs in ranks] for number in range(2))
        yield from judged_name(part, getattr(module, "RANK", None), drawn(seed), read_profile(Path(folder) / "0"))
    yield from judged_mended(slow, mended, drawn(seed).part)


def judged_name(part: Part, rank: int | None, truth: Drawn, profile: Profile) -> Iterator[str]:
    """Yields that what the reader has found is right; raises Mistake if it is not.

    Args:
        profile: of the slow program.
    """
    least, most = (pick(shares(profile, part)) for pick in (min, max))
    of_a_step = f"{part} takes a rank {1e3 * least:.1f} to {1e3 * most:.1f} ms of {1e3 * profile.step_s:.1f} ms a step"
    if part == "wait":
        hint = "a rank that waits is not slow: whom does it wait for, and what does that rank do meanwhile?"
        raise Mistake(FOUND, of_a_step, hint)
    if part != truth.part:
        raise Mistake(FOUND, of_a_step, "profile it, and look for what is longest on the rank that waits least")
    if rank != truth.rank:
        hint = "do both ranks take long there, or does one wait while the other does? RANK is None, or that other one"
        raise Mistake(FOUND, f"{of_a_step}, and RANK is {rank}", hint)
    yield f"{FOUND}: {of_a_step}"


def shares(profile: Profile, part: Part) -> list[float]:
    """Returns the seconds that each rank is in a part of the step, medians over the steps."""
    return [median(step[rank].parts[part] for step in profile.steps) for rank in range(profile.world_size)]


def judged_mended(slow: Sequence[Found], mended: Sequence[Found], part: str) -> Iterator[str]:
    """Yields what is right with the reader's program beside the slow one; raises Mistake at what is not.

    Args:
        part: of the step that is slow.
    """
    once = "the same numbers in less time: compute once what is the same each time, and all at once what is alike"
    for rank, (before, after) in enumerate(zip(slow, mended, strict=True)):
        where = f"{MENDED}, rank {rank}"
        for number, (was, loss) in enumerate(zip(before.losses, after.losses, strict=False), 1):
            if loss != was:
                raise Mistake(where, f"the loss of step {number} is {loss!r}, and was {was!r}", once)
        if not torch.equal(before.weights, after.weights):
            raise Mistake(where, "the last weights are not the same, bit by bit", once)
        if before.written != after.written:
            raise Mistake(where, "train returns something else than before", f"what is written down, too: {once}")
    yield f"{MENDED}: the same losses, weights and notes, bit by bit"
    was, now = (max(rank.num_calls for rank in ranks) for ranks in (slow, mended))
    took = f"a step makes {now:,} calls of functions, and made {was:,}"
    if not now <= FASTER * was:
        raise Mistake(MENDED, took, f"the slow part is {part}: how long does it take in a profile of your program?")
    yield f"{MENDED}: {took}"


# --- where it runs ---------------------------------------------------------------------------------------------------


class Meter(ddp.Callback):
    """Notes the loss of each step, and counts the calls in one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_calls = 0

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.losses.append(report.loss)
        if report.step in (COUNTED - 1, COUNTED):
            sys.setprofile(self._note if report.step < COUNTED else None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.num_calls += event in ("call", "c_call")


def as_rank(paths: Sequence[Path], folder: Path, num_profiled: int = 1) -> list[Found]:
    """Runs programs, one after another, as one rank.

    Args:
        folder: for their runs, which it calls 0, 1, and so on.
        num_profiled: this many leave a profile.
    """
    try:
        return [_found(path, folder / f"{number}", number < num_profiled) for number, path in enumerate(paths)]
    finally:
        ddp.shutdown()


def _found(path: Path, run: Path, is_profiled: bool) -> Found:
    from recipes.tutorial.tools.exercise import loaded  # which imports this module

    library, found, module = ddp.fit, list[Found](), ModuleType("unloaded")

    def watched(model: nn.Module, *given: Any, callbacks: Any = (), **how: Any) -> ddp.TrainState:
        meter, others = Meter(), [each for each in callbacks if not isinstance(each, ddp.Profiler)]
        how |= {"max_steps": NUM_STEPS, "epochs": None, "folder": ddp.Folder(run, progress=False, curves=False)}
        profiler = [ddp.Profiler(steps=5)] if is_profiled else []
        state = library(model, *given, callbacks=[*others, meter, *profiler], **how)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        found.append(Found((), tuple(meter.losses), weights, None, meter.num_calls))
        return state

    module.__file__ = str(path)
    try:
        ddp.fit = watched  # before the program is imported
        module = loaded(path, "bottleneck")
        with chdir(run.parent):
            written = module.train()
        if not found:
            return Found((RUNS, "train has not called ddp.fit", "leave that to it, on every worker"))
        return found[-1]._replace(written=written)
    except (Exception, SystemExit) as error:
        return Found(in_words(RUNS, error, module))
    finally:
        ddp.fit = library


def _run(paths: Sequence[Path], folder: Path) -> list[list[Found]]:
    """Runs programs on two workers; raises Mistake if one fails."""
    try:
        ranks = launch(as_rank, paths, folder, workers=NUM_RANKS, threads_per_worker=1, timeout_s=LIMIT_S)
    except WorkersFailed as error:
        raise Mistake(RUNS, str(error)) from None
    raise_first(found.mistake for programs in ranks for found in programs)
    return ranks
