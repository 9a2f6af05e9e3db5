"""Says who has read which sample, from the settings of a run alone: in it, and years after it.

    RUN_DIR/starts.jsonl        each start of the run: its settings, and the checkpoint's position that it went on from
             │
             ├──▶  python -m ddp where runs/mine --step 4711              the samples of a step, by rank and shard
             └──▶  python -m ddp where runs/mine --sample 123 --epoch 7   the step, rank and loader process of a sample

Nothing that is read is logged for that: orders are pure functions. To find a sample, all positions of the epoch are
looked through, which takes a second for a million of them. A run that was resumed has several starts, perhaps with
other settings; a step belongs to the last start before it. No code of the run is imported, because a question about
somebody's folder must not run what is in it; of data of the user's own, each start has noted what a sampler asks of
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ddp.commands.command import parser_of, respond
from ddp.data.orders.sampler import Micro, StepPlan, TrainSampler
from ddp.data.samples import Samples, Splits
from ddp.data.sets.validation import selection_in, with_share
from ddp.errors import ConfigError
from ddp.process.arguments import program, whole
from ddp.process.files import lines_of
from ddp.process.records import damage_told, json_object
from ddp.run.assembly.components import load_data
from ddp.run.assembly.sampling import StandInData, num_parts, sampler_for
from ddp.run.settings.address import no_own_code
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.train.reports.starts import STARTS
from ddp.units import counted


def main(words: Sequence[str]) -> int:
    """Says which samples were in a step of a run, or when and by whom a sample was read."""
    parser = parser_of("where")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=whole(1), help="number of a step, from 1")
    parser.add_argument("--sample", type=whole(0), help="number of a training sample, from 0")
    parser.add_argument("--epoch", type=whole(0), help="the epoch in which to look for it, from 0")
    return respond(parser, parser.parse_args(words), lambda options: where(**vars(options)))


class Start(NamedTuple):
    """One start of a run.

    Attributes:
        config, splits: its settings and data.
        step: the step after which it went on; 0 for a new run.
        state: of the sampler there; None for a new run.
        last_step: the last one that belongs to it, because a later start went on from there; None for the last start.
        following: the sampler's state from which that one went on.
        left_out: number, position and size of the steps that its guard has left out.
    """

    config: Config
    splits: Splits
    step: int = 0
    state: Mapping[str, Any] | None = None
    last_step: int | None = None
    following: Mapping[str, Any] | None = None
    left_out: Sequence[tuple[int, int, int]] = ()

    def until(self, step: int, state: Mapping[str, Any] | None) -> Start:
        """Returns it, if a later start resumes from a step and a state."""
        if self.last_step is not None and step >= self.last_step:
            return self
        left_out = [each for each in self.left_out if each[0] <= step]
        return self._replace(last_step=step, following=state, left_out=left_out)

    def samplers(self) -> list[TrainSampler]:
        """Returns the samplers of all ranks, as they were at this start."""
        ranks = range(num_parts(self.config))
        samplers = [sampler_for(self.config, self.splits, rank=rank) for rank in ranks]
        if self.state is not None:
            for sampler in samplers:
                sampler.load_state_dict(self.state)
        for sampler in samplers:
            for step in self.left_out:
                sampler.leave_out(*step)
        return samplers

    def end(self, sampler: TrainSampler) -> int:
        """Returns the last step of this start."""
        most = None if self.config.max_steps is None else self.config.max_steps - self.step
        left, _ = sampler.end(epochs=self.config.epochs, num_steps=most)
        return self.step + left if self.last_step is None else min(self.last_step, self.step + left)


def where(run: Path, *, step: int | None, sample: int | None, epoch: int | None) -> str:
    """Returns an answer about a run that was started from the command line.

    Raises:
        ConfigError: the run has no settings, or not just one question was asked.
    """
    if (step is None) == (sample is None) or (sample is None) != (epoch is None):
        raise ConfigError("ask for --step N, or for --sample N --epoch N")
    with no_own_code("where"), damage_told(run / STARTS, "no answer can be had from it"):
        starts = starts_of(run)
        if step is not None:
            return samples_of_step(starts, step)
        return place_of_sample(starts, cast(int, sample), cast(int, epoch))


def starts_of(run: Path) -> list[Start]:
    """Returns the starts of a run that have made steps, in their order.

    Raises:
        ConfigError: the folder holds no run, or its data are gone.
    """
    path = run / STARTS
    if not path.is_file():
        raise ConfigError(
            f"{run} holds no {STARTS}: is it the folder of a run of {program()} train or ddp.fit? Of a stream, whose "
            "samples have no numbers, nothing is noted, and older versions of ddp.fit have noted nothing"
        )
    with damage_told(path, "no answer can be had from it"):
        noted = [_incident(line) or _noted(line) for line in map(json_object, lines_of(path))]
    if not noted:
        raise ConfigError(f"{path} is empty: no answer can be had from it")
    found: list[Start] = []
    for line in noted:
        if isinstance(line, Incident):
            if not found:
                raise ConfigError(f"{path} is damaged (a bad step before any start): no answer can be had from it")
            found = line.added_to(found)
            continue
        config, folder, step, state, facts, order = line
        found = [start.until(step, state) for start in found if start.step < step]  # what came after it was lost
        with contextlib.chdir(folder if folder.is_dir() else "."):  # relative paths are meant from there
            splits = load_data(config) if facts is None else _noted_splits(config, facts)
            found.append(Start(config, splits, step, state))
        if order not in (None, sampler_for(config, splits, rank=0).order.identity):
            raise ConfigError(
                f"the order of the run, {order}, was made by its program, from an order, a sharding or a budget of its "
                "own, which is not noted: only the program can say which sample was where"
            )
    return found


class Incident(NamedTuple):
    """A bad step, which the guard of a run has left out, or after which it has gone back to a checkpoint.

    Attributes:
        left_out: number, position and size of the step.
        to: step and sampler's state to which the run has gone back; None if it has left the step out.
    """

    left_out: tuple[int, int, int]
    to: tuple[int, Mapping[str, Any]] | None

    def added_to(self, starts: list[Start]) -> list[Start]:
        """Returns the starts as they are then: one that has gone back is followed by another one."""
        *before, last = starts
        if self.to is None:
            return [*before, last._replace(left_out=[*last.left_out, self.left_out])]
        step, state = self.to
        kept = [start.until(step, state) for start in starts if start.step < step]
        return [*kept, last._replace(step=step, state=state, last_step=None, following=None, left_out=())]


def _incident(line: Any) -> Incident | None:
    """Returns the bad step that a line of starts.jsonl is about; None of a start."""
    if facts := line.get("left_out") or line.get("went_back"):
        step = int(facts["step"]), int(facts["position"]), int(facts["size"])
        return Incident(step, (int(facts["to"]), dict(facts["sampler"])) if "went_back" in line else None)
    return None


def _noted_splits(config: Config, facts: Mapping[str, Any]) -> Splits:
    """Returns stand-ins for data of the user's own."""
    splits, share = Splits(train=StandInData(facts), test=()), config.data.validation
    return splits if share is None else with_share(splits, share, seed=config.seed)


def _noted(line: Any) -> tuple[Config, Path, int, Mapping[str, Any] | None, Mapping[str, Any] | None, str | None]:
    """Returns settings, folder, step, sampler's state, and what is noted of data, of a line of starts.jsonl."""
    position = line["position"]
    step, state = (0, None) if position is None else (int(position["step"]), dict(position["sampler"]))
    return from_plain(line["settings"]), Path(line["folder"]), step, state, line.get("dealt"), line.get("order")


def samples_of_step(starts: list[Start], step: int) -> str:
    """Returns, as text, which samples each rank has in a step of the run, counted from 1.

    Raises:
        ConfigError: the run has no such step.
    """
    start = next((start for start in reversed(starts) if start.step < step), starts[0])
    samplers = start.samplers()
    if not start.step < step <= start.end(samplers[0]):
        last = starts[-1].end(starts[-1].samplers()[0])
        raise ConfigError(f"--step {step}: the run has steps {starts[0].step + 1:,} to {last:,}")
    lines = []
    for rank, sampler in enumerate(samplers):
        sampler.seek(step)
        plan = next(sampler.plans())
        before = _num_micros_before(sampler, plan)
        if not rank:
            lines.append(f"step {step:,}, in epoch {plan.epoch}: {counted(plan.size, 'sample')}")
        for number, micro in enumerate(plan.micros):
            lines += _lines_of(micro, rank, _loader(start.config, before + number), start.splits.train)
        if not plan.micros:
            lines.append(f"rank {rank}: none")
    return "\n".join(lines)


def place_of_sample(starts: list[Start], sample: int, epoch: int) -> str:
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
    found = [
        each
        for start in starts
        for each in _places(start, sample, epoch, is_first=start is starts[0], is_last=start is starts[-1])
    ]
    return "\n".join(f"{name}: {each}" for each in found) or f"{name}: not drawn"


def _places(start: Start, sample: int, epoch: int, *, is_first: bool, is_last: bool) -> Iterator[str]:
    """Yields who reads a sample in the steps of one start; the first and the last also tell what is outside of them."""
    samplers = start.samplers()
    first, end = samplers[0], start.end(samplers[0])
    # Where workers lease steps, these are made in any order inside an epoch: the next start's state says which were.
    following = start._replace(state=start.following).samplers()[0] if (start.following or {}).get("ahead") else None
    for position in first.order.positions(sample, seed=first.state.seed, epoch=epoch):
        where = epoch * first.length + position
        if (skipped := first.left_out_from(where)) is not None:
            if any(begin <= where < begin + size for _, begin, size in start.left_out):
                yield f"left out, by the run's guard, before step {skipped:,}"
            elif is_last or skipped <= end + 1:
                yield f"left out, by data.skip_steps={start.config.data.skip_steps}"
            continue
        if first.was_made(where):
            if is_first:
                yield f"read before step {start.step + 1:,}, with which this run began"
            continue
        step = first.step_at(where)
        if step <= end if following is None else following.was_made(where):
            yield _place(start, samplers, step, position)
        elif is_last:
            yield f"never read: that would be in step {step:,}, and the run has {end:,}"


def _place(start: Start, samplers: list[TrainSampler], step: int, position: int) -> str:
    """Returns who reads the sample at a position of the epoch of a step."""
    for rank, sampler in enumerate(samplers):
        sampler.seek(step)
        plan = next(sampler.plans())
        before = _num_micros_before(sampler, plan)
        for number, micro in enumerate(plan.micros):
            if position in micro.positions:
                where = f"step {step:,}, rank {rank}, {_loader(start.config, before + number)}shard {micro.shard}"
                return f"{where}, part {micro.part}" if start.config.batch.micro_size else where
    raise AssertionError(position)


def _num_micros_before(sampler: TrainSampler, plan: StepPlan) -> int:
    """Returns how many micro-batches the rank has fetched in the epoch, since this start, before a step of it."""
    steps = sampler.steps_before(plan)
    sizes, numbers = np.unique([len(step) for step in steps], return_counts=True)
    return sum(sampler.num_micros(int(size)) * int(number) for size, number in zip(sizes, numbers, strict=True))


def _loader(config: Config, number: int) -> str:
    """Returns who fetches a rank's micro-batch with this number in an epoch: DataLoader's processes take turns."""
    processes = config.loader.num_workers or 0
    return f"loader process {number % processes}, " if processes else ""


def _lines_of(micro: Micro, rank: int, loader: str, samples: Samples) -> Iterator[str]:
    """Yields the samples of a micro-batch, by file if they lie in files."""
    part = f", part {micro.part}" if micro.part else ""
    yield f"rank {rank}, {loader}shard {micro.shard}{part}:"
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
