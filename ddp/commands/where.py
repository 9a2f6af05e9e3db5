"""Says which rank has read which sample, from the settings of a run alone: during the run, and years after it.

    RUN_DIR/starts.jsonl        each start of the run: its settings, and the checkpoint's position that it resumed from
             │
             ├──▶  python -m ddp where runs/mine --step 4711              the samples of a step, by rank and shard
             └──▶  python -m ddp where runs/mine --sample 123 --epoch 7   the step, rank and shard of a sample

No log of reads is needed, because orders are pure functions. A permutation says at once where a sample is; of another
order the command searches all positions of the epoch, which takes a second for a million of them. A run that was
resumed has several starts, perhaps with other settings; a step belongs to the last start before it. No code of the run
is imported, because a question about another user's folder must not run code in it. For the user's own data, each start
has recorded what a sampler reads of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ddp.commands.registry import parser_of, respond
from ddp.data.orders.sampler import Micro, StepPlan, TrainSampler
from ddp.data.samples import Samples, Splits
from ddp.data.sets.validation import selection_in, with_share
from ddp.errors import ConfigError
from ddp.process.arguments import program, whole
from ddp.process.files import lines_of
from ddp.process.records import damage_as_error, json_object
from ddp.run.assembly.components import load_data
from ddp.run.assembly.sampling import StandInData, num_parts, sampler_for
from ddp.run.settings.address import no_own_code
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.train.reports.history import STARTS
from ddp.units import counted


def main(words: Sequence[str]) -> int:
    """Says which samples were in a step of a run, or when and by whom a sample was read."""
    parser = parser_of("where")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=whole(1), help="number of a step, from 1")
    parser.add_argument("--sample", type=whole(0), help="number of a training sample, from 0")
    parser.add_argument("--epoch", type=whole(0), help="the epoch in which to look for it, from 0")
    return respond(parser, parser.parse_args(words), lambda options: where(**vars(options)))


def where(run: Path, *, step: int | None, sample: int | None, epoch: int | None) -> str:
    """Returns an answer about a run that was started from the command line.

    Raises:
        ConfigError: the run has no settings, or not just one question was asked.
    """
    if (step is None) == (sample is None) or (sample is None) != (epoch is None):
        raise ConfigError("ask for --step N, or for --sample N --epoch N")
    with no_own_code("where"), damage_as_error(run / STARTS, "no answer can be had from it"):
        starts = starts_of(run)
        if step is not None:
            return samples_of_step(starts, step)
        return place_of_sample(starts, cast(int, sample), cast(int, epoch))


# --- the starts of a run ---------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """One start of a run; `after` always is the next start, which resumed from there, and None for the last.

    Attributes:
        config, splits: its settings and data.
        step: the step after which it resumed; 0 for a new run.
        state: of the sampler there; None for a new run.
        left_out: number, position and size of the steps that its guard has left out.
    """

    config: Config
    splits: Splits
    step: int = 0
    state: Mapping[str, Any] | None = None
    left_out: Sequence[tuple[int, int, int]] = ()

    def sampler(self, after: Start | None = None, *, rank: int = 0) -> TrainSampler:
        """Returns the sampler of a rank, as it was at this start."""
        sampler = sampler_for(self.config, self.splits, rank=rank)
        if self.state is not None:
            sampler.load_state_dict(self.state)
        for step in self.left_out:
            if after is None or step[0] <= after.step:
                sampler.leave_out(*step)
        return sampler

    def plans(self, step: int, after: Start | None) -> Iterator[StepPlan]:
        """Yields a step of this start as each rank has it."""
        for rank in range(num_parts(self.config)):
            sampler = self.sampler(after, rank=rank)
            sampler.seek(step)
            yield next(sampler.plans())

    def end(self, after: Start | None) -> int:
        """Returns the last step of this start."""
        most = None if self.config.max_steps is None else self.config.max_steps - self.step
        left, _ = self.sampler(after).end(epochs=self.config.epochs, num_steps=most)
        return self.step + left if after is None else min(after.step, self.step + left)


def starts_of(run: Path) -> list[Start]:
    """Returns the starts of a run that have made steps, in their order.

    Raises:
        ConfigError: the folder holds no run, or its data are gone.
    """
    path = run / STARTS
    if not path.is_file():
        raise ConfigError(
            f"{run} holds no {STARTS}: give the folder of a run of {program()} train or ddp.fit. A run on a stream, "
            "whose samples have no numbers, records nothing, and neither did older versions of ddp.fit"
        )
    starts: list[Start] = []
    for line in map(json_object, lines_of(path)):
        is_of_step = "left_out" in line or "went_back" in line
        starts = _after_bad_step(starts, line) if is_of_step else _after_start(starts, line)
    if not starts:
        raise ConfigError(f"{path} is empty: no answer can be had from it")
    return starts


def _after_start(starts: Sequence[Start], line: Mapping[str, Any]) -> list[Start]:
    """Returns the starts once there is another one, which a line of starts.jsonl describes."""
    config, position, facts = from_plain(line["settings"]), line["position"], line.get("dealt")
    step, state = (0, None) if position is None else (int(position["step"]), dict(position["sampler"]))
    with contextlib.chdir(folder if (folder := Path(line["folder"])).is_dir() else "."):  # for relative paths
        splits = load_data(config) if facts is None else Splits(train=StandInData(facts), test=())
    if facts is not None and config.data.validation is not None:
        splits = with_share(splits, config.data.validation, seed=config.seed)
    if line.get("order") not in (None, sampler_for(config, splits, rank=0).order.identity):
        raise ConfigError(
            f"the order of the run, {line['order']}, was made by its program, from an order, a sharding or a budget of "
            "its own, which is not recorded: only the program can say which sample was where"
        )
    kept = [start for start in starts if start.step < step]  # what came after it was lost
    return [*kept, Start(config, splits, step, state)]


def _after_bad_step(starts: Sequence[Start], line: Mapping[str, Any]) -> list[Start]:
    """Returns the starts once the guard has left a step out, or has gone back, which is like another start."""
    if not starts:
        raise ValueError("a bad step before any start")
    *before, last = starts
    facts = line.get("left_out") or line["went_back"]
    left_out = int(facts["step"]), int(facts["position"]), int(facts["size"])
    if "went_back" not in line:
        return [*before, last._replace(left_out=[*last.left_out, left_out])]
    again = last._replace(step=int(facts["to"]), state=dict(facts["sampler"]), left_out=())
    return [*(start for start in starts if start.step < again.step), again]


# --- the answers -----------------------------------------------------------------------------------------------------


def samples_of_step(starts: Sequence[Start], step: int) -> str:
    """Returns, as text, which samples each rank has in a step of the run, counted from 1.

    Raises:
        ConfigError: the run has no such step.
    """
    number = max((number for number, start in enumerate(starts) if start.step < step), default=0)
    start, after = starts[number], (*starts[number + 1 :], None)[0]
    if not start.step < step <= start.end(after):
        raise ConfigError(f"--step {step}: the run has steps {starts[0].step + 1:,} to {starts[-1].end(None):,}")
    plans = list(start.plans(step, after))
    lines = [f"step {step:,}, in epoch {plans[0].epoch}: {counted(plans[0].size, 'sample')}"]
    for rank, plan in enumerate(plans):
        for micro in plan.micros:
            lines += _lines_of(micro, rank, start.splits.train)
        if not plan.micros:
            lines.append(f"rank {rank}: none")
    return "\n".join(lines)


def place_of_sample(starts: Sequence[Start], sample: int, epoch: int) -> str:
    """Returns, as text, in which steps of an epoch a sample is read, and by whom. Epochs are counted from 0.

    Raises:
        ConfigError: there is no such sample or epoch.
    """
    samples = starts[-1].splits.train
    part, number = selection_in(samples), sample
    num_samples = len(samples if part is None else part.samples)
    if not 0 <= number < num_samples:
        raise ConfigError(f"--sample {number}: the data have samples 0 to {num_samples - 1}")
    if epoch < 0:
        raise ConfigError(f"--epoch {epoch}: epochs are counted from 0")
    if part is not None:
        sample = int(np.searchsorted(part.numbers, number))
        if sample == len(part) or part.numbers[sample] != number:
            return f"sample {number}: never trained on, because it is set apart by data.validation"
    name = f"sample {number}{_file_of(samples, sample)}, epoch {epoch}"
    pairs = zip(starts, [*starts[1:], None], strict=True)
    found = [each for start, after in pairs for each in _places(start, after, sample, epoch, first=starts[0])]
    return "\n".join(f"{name}: {each}" for each in found) or f"{name}: not drawn"


def _places(start: Start, after: Start | None, sample: int, epoch: int, *, first: Start) -> Iterator[str]:
    """Yields who reads a sample in the steps of one start; the first and the last also tell what is outside of them."""
    sampler, end = start.sampler(after), start.end(after)
    # Where workers lease steps, these are made in any order inside an epoch: the next start's state says which were.
    made = start._replace(state=after.state).sampler(after) if after and "ahead" in (after.state or {}) else None
    for position in sampler.order.positions(sample, seed=sampler.state.seed, epoch=epoch):
        at = epoch * sampler.length + position
        if (skipped := sampler.left_out_from(at)) is not None:
            if any(begin <= at < begin + size for _, begin, size in start.left_out):
                yield f"left out, by the run's guard, before step {skipped:,}"
            elif after is None or skipped <= end + 1:
                yield f"left out, by data.skip_steps={start.config.data.skip_steps}"
            continue
        if sampler.was_made(at):
            if start is first:
                yield f"read before step {start.step + 1:,}, with which this run began"
            continue
        step = sampler.step_at(at)
        if step <= end if made is None else made.was_made(at):
            micros = ((rank, micro) for rank, plan in enumerate(start.plans(step, after)) for micro in plan.micros)
            rank, micro = next((rank, micro) for rank, micro in micros if position in micro.positions)
            part = f", part {micro.part}" if start.config.batch.micro_size else ""
            yield f"step {step:,}, rank {rank}, shard {micro.shard}{part}"
        elif after is None:
            yield f"never read: that would be in step {step:,}, and the run has {end:,}"


def _lines_of(micro: Micro, rank: int, samples: Samples) -> Iterator[str]:
    """Yields the samples of a micro-batch, by file if they lie in files."""
    yield f"rank {rank}, shard {micro.shard}{f', part {micro.part}' if micro.part else ''}:"
    by_file: dict[str, list[int]] = {}
    rest = selection_in(samples)
    for sample in micro.indices:
        by_file.setdefault(_file_of(samples, sample), []).append(sample if rest is None else int(rest.numbers[sample]))
    for file, numbers in by_file.items():
        yield f"    {' '.join(map(str, numbers))}{file}"


def _file_of(samples: Samples, sample: int) -> str:
    """Returns the name of a sample's file, as text, if it lies in one that has a name."""
    addresses = getattr(samples, "addresses", None)
    if addresses is None:
        return ""
    ends = np.cumsum(np.asarray(cast(Any, samples).file_sizes))
    return f"  in {addresses[int(np.searchsorted(ends, sample, side='right'))]}"
