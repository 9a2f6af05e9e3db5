"""The history of a run: how it was started, and hashes and traces that find the first step in which two runs differ.

starts.jsonl    a line for each start, and for each step that a guard has acted on: by it `where` says years later
                which sample was in which step
hashes.jsonl    hashes of parameters, buffers, optimizer state and loss, every few steps
traces          find where two runs part within a step; they are not written
logs/calls-…    the last collectives of a rank that fails
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ddp.comm.communicator import Communicator
from ddp.comm.objects import on_rank_zero
from ddp.data.loading.source import Source
from ddp.data.orders.order import Fixed, Permutation
from ddp.data.orders.steps import Batches
from ddp.data.sets.validation import selection_in
from ddp.errors import USER_ERRORS, ConfigError
from ddp.policies import Training
from ddp.process.files import if_possible, lines_of, make_folder, to_append, write_whole
from ddp.process.records import damage_as_error, json_object, made, to_json
from ddp.replica.autograd import tensors_in
from ddp.replica.broadcast import checksum, tensor_hash
from ddp.train.checkpoints.checkpoint import changes
from ddp.train.reports.meters import drop_after
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

HASHES, STARTS = "hashes.jsonl", "starts.jsonl"
DIGITS = 16  # 8 bytes, in hexadecimal
LOSS = "the loss"  # with a space, because a parameter may be called "loss"

# --- Writing hashes --------------------------------------------------------------------------------------------------
#
#     {"step": 1, "identity": {…}}                         a start of the run, and the first step that it makes
#     {"step": 10, "names": ["0.weight", …]}               names of the next lines' hashes; again if they change
#     {"step": 10, "loss": "0x1.8p+0", "hashes": "9f3c…"}  `DIGITS` for each name, one after another
#
# Names stand in the order in which an answer has them: parameters and buffers in the model's order, with
# precision="bf16_pure" the master weights; "exp_avg of 0.weight" and the like, in the optimizer's order; "loss scale".
# Names are written once, because they take three times the room of the hashes.
#
# A hash is of bits: −0.0 and 0.0 have different ones. A line costs rank 0 some 1.4 s for each gigabyte of state, and
# the others what a checkpoint costs them: a sharded optimizer's state is collected on rank 0. With strategy="local_sgd"
# the parameters between two agreements are those of rank 0; with a delay the exchange under way ends before, as for a
# checkpoint.


class HashesFile(Callback):
    """Appends a line to hashes.jsonl every few steps, and after the last one.

    A resumed run first drops the lines beyond its checkpoint, also if it writes no hashes itself.

    Args:
        every: steps between two lines; 0: none is written.
    """

    def __init__(self, path: Path, *, every: int) -> None:
        self._path, self._every = path, every
        self._names: list[str] = []  # on rank 0, of the last line
        self._last_step = 0  # that has a line

    def fit_start(self, state: TrainState) -> None:
        if self._every:
            self._last_step = on_rank_zero(state.comm, lambda: self._begin(state), label=f"the start of {HASHES}")
        elif state.comm.rank == 0:
            drop_after(state.step, self._path)

    went_back = fit_start

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if self._every and report.step % self._every == 0:
            self._add(state, report.loss)

    def fit_end(self, state: TrainState) -> None:
        if self._every and state.train_loss is not None and self._last_step != state.step:
            self._add(state, state.train_loss)

    def _begin(self, state: TrainState) -> int:
        """Returns the last step that has a line, and records the identity of the run. On rank 0 only."""
        drop_after(state.step, self._path)
        self._names = []
        known = map(json_object, lines_of(self._path))
        last_step = max((int(line["step"]) for line in known if "hashes" in line), default=0)
        self._append(
            {"step": state.step + 1, "identity": {**state.settings, "training_samples": state.sampler.num_samples}}
        )
        return last_step

    def _add(self, state: TrainState, loss: float) -> None:
        """Adds the line of the step that was made last. Collective."""
        whole, self._last_step = state.strategy.state_dict(), state.step
        if state.comm.rank:
            return
        if not self._path.exists():  # it was deleted
            self._begin(state)
        values = dict(_named_values(state, whole))
        if (names := list(values)) != self._names:
            self._names = names
            self._append({"step": state.step, "names": names})
        hashes = "".join(map(_hash, values.values()))
        self._append({"step": state.step, "loss": float(loss).hex(), "hashes": hashes})

    def _append(self, line: dict[str, Any]) -> None:
        with to_append(self._path) as file:
            file.write(f"{to_json(line, separators=(',', ':'), default=str)}\n")


def _named_values(state: TrainState, whole: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the hashed values by name, in the file's order.

    Args:
        whole: the strategy's state.
    """
    module, weights, optimizer = state.model.module, whole["model"], whole["optimizer"]
    yield from ((name, value) for name, value in weights.items() if isinstance(value, Tensor))
    yield from ((name, value) for name, value in module.named_buffers() if name not in weights)  # that are not saved
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for numbers, group in zip(optimizer["param_groups"], state.optimizer.param_groups, strict=True):
        for number, parameter in zip(numbers["params"], group["params"], strict=True):
            of_parameter = optimizer["state"].get(number, {})
            for name in sorted(of_parameter):  # a resumed run may have them in another order
                yield f"{name} of {names.get(id(parameter), f'parameter {number}')}", of_parameter[name]
    if whole["loss_scale"] is not None:
        yield "loss scale", whole["loss_scale"]


def _hash(value: Any) -> str:
    """Returns a hash of tensors and numbers in any nested form."""
    leaves = (tensor_hash(each) if isinstance(each, Tensor) else repr(each) for each in tree_leaves(value))
    return hashlib.blake2b(" ".join(leaves).encode(), digest_size=DIGITS // 2).hexdigest()


# --- Reading hashes --------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """The hashes after one step, and the identity of the run as it was started then."""

    identity: Mapping[str, Any]
    names: list[str]
    hashes: str
    loss: str

    def by_name(self) -> dict[str, str]:
        """Returns hashes, and the loss, by name, in the order of the names."""
        hashes = (self.hashes[at : at + DIGITS] for at in range(0, len(self.hashes), DIGITS))
        return {**dict(zip(self.names, hashes, strict=True)), LOSS: self.loss}


def read_hashes(run: Path) -> dict[int, Line]:
    """Returns the lines of a run by step, in the order of steps. A last line that a crash cut off is left out.

    Raises:
        ConfigError: there are none, or the file is damaged; the message has the remedy.
    """
    path = run / HASHES
    if not path.is_file():
        raise ConfigError(
            f"{run} holds no {HASHES}: make the run with same_bits.hash_every=10, in Python with "
            "same_bits=ddp.SameBits(hash_every=10)"
        )
    found: dict[int, Line] = {}
    identity, names = None, list[str]()
    for number, text in enumerate(lines_of(path), start=1):
        with damage_as_error(f"line {number} of {path}", "make the run again, or resume it from an earlier step"):
            entry = json_object(text)
            step = int(entry["step"])
            if "identity" in entry:
                identity = dict(entry["identity"])
            elif "names" in entry:
                names = made(list[str], entry["names"])
            elif identity is None or len(entry["hashes"]) != len(names) * DIGITS:
                raise ValueError("the lines before do not name its hashes")
            else:
                found[step] = Line(identity, names, str(entry["hashes"]), str(entry["loss"]))
    return dict(sorted(found.items()))


# --- Comparing hashes ------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """The step from which on two runs differ.

    Attributes:
        steps: that both have hashes of, in their order.
        last_equal: the last one before any difference; None: the first one differs.
        first_different: None: all are equal.
        names: of the values that differ there, in the order of a line.
        num_names: of all that one of them has a hash of there; 0 if nothing differs.
        changed: settings and surroundings that the bits depend on, and that differ: "seed was 0, is 1".
    """

    steps: list[int]
    last_equal: int | None
    first_different: int | None
    names: list[str]
    num_names: int
    changed: list[str]


def compare(one: Mapping[int, Line], other: Mapping[int, Line]) -> Comparison:
    """Compares two runs at the steps that both have hashes of.

    Raises:
        ConfigError: there are none.
    """
    steps = sorted(one.keys() & other.keys())
    if not steps:
        raise ConfigError(
            f"no step has hashes in both runs: {_in_words(one)} in the first, {_in_words(other)} in the second; take "
            "the same same_bits.hash_every"
        )
    last_equal, changed = None, dict[str, None]()
    identities: tuple[Any, Any] | None = None
    for step in steps:
        here, there = one[step], other[step]
        if identities is None or here.identity is not identities[0] or there.identity is not identities[1]:
            identities = here.identity, there.identity
            changed |= dict.fromkeys(changes(*identities))
        if here[1:] != there[1:] and (mine := here.by_name()) != (theirs := there.by_name()):
            names = sorted({**mine, **theirs}, key=lambda name: name == LOSS)  # the loss is the last
            differing = [name for name in names if mine.get(name) != theirs.get(name)]
            return Comparison(steps, last_equal, step, differing, len(names), list(changed))
        last_equal = step
    return Comparison(steps, last_equal, None, [], 0, list(changed))


def _in_words(lines: Mapping[int, Line]) -> str:
    return f"steps {', '.join(map(str, list(lines)[:3]))}{' …' if len(lines) > 3 else ''}" if lines else "none"


# --- Tracing: a checksum of each module's outputs, and of each gradient, in the order of time ------------------------
#
# Two runs that differ are made again from a checkpoint, each with its own settings, and their traces are compared
# (`commands/same_bits.py`): the first entry that differs is where their bits part.


Entry = tuple[int, str, int]  # shard, what, and its checksum


class StepTrace(NamedTuple):
    """The trace of one step.

    Attributes:
        entries: in the order of time.
        updated: checksums of parameters and buffers after the step, by name.
    """

    step: int
    entries: list[Entry]
    updated: dict[str, int]


class Trace(Callback):
    """Traces the steps of a run by shards, and ends it after the last of them.

    Args:
        last_step: after which the run is to end.

    Attributes:
        steps: that were made.
    """

    def __init__(self, last_step: int) -> None:
        self.steps: list[StepTrace] = []
        self._last_step, self._entries = last_step, list[Entry]()
        self._handles: list[RemovableHandle] = []

    def fit_start(self, state: TrainState) -> None:
        module = state.model.module
        for name, each in module.named_modules():
            kind = type(each).__name__
            title = f"the outputs of {f'{name} ({kind})' if name else kind}"
            self._handles.append(each.register_forward_hook(partial(self._note_outputs, state, title)))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._note, state, f"the gradient of {name}")))

    def step_start(self, state: TrainState) -> None:
        self._entries = []
        if state.step + 1 >= self._last_step:
            state.stop("traced")

    def step_end(self, state: TrainState, report: StepReport) -> None:
        module = state.model.module
        updated = {f"the update of {name}": checksum(each) for name, each in module.named_parameters()}
        updated |= {f"the buffer {name}": checksum(each) for name, each in module.named_buffers()}
        self.steps.append(StepTrace(report.step, self._entries, updated))

    def fit_end(self, state: TrainState) -> None:
        for handle in self._handles:
            handle.remove()

    def _note_outputs(self, state: TrainState, title: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            self._note(state, title, tensor)

    def _note(self, state: TrainState, title: str, tensor: Tensor) -> None:
        shard = state.model.accumulation.running
        if shard is not None:  # else it is another forward than a step's
            self._entries.append((shard, title, checksum(tensor)))


def parting(one: list[StepTrace], other: list[StepTrace]) -> tuple[int, str] | None:
    """Returns the first step in which two traces part, and as text where; None if they are equal."""
    for here, there in zip(one, other, strict=False):
        for mine, theirs in zip(here.entries, there.entries, strict=False):
            if mine[:2] != theirs[:2]:
                what = f"shard {mine[0]}, where one has {mine[1]}, and the other shard {theirs[0]}, {theirs[1]}"
                return here.step, what
            if mine != theirs:
                return here.step, f"shard {mine[0]}, in {mine[1]}"
        if len(here.entries) != len(there.entries):
            return here.step, "the number of modules that are called"
        changed = [what for what, value in here.updated.items() if there.updated.get(what) != value]
        if changed:
            return here.step, f"{changed[0]}, while all gradients of all shards are equal"
    return None


# --- Starts, and what became of bad steps ----------------------------------------------------------------------------
#
# starts.jsonl has a line for each start:
#
#     folder, settings     where it was started, and how, as `ddp/run/settings/config.py` has it
#     position             step and sampler state that it continued from; null for a new run
#     dealt                facts about samples that only the program has, and that a sampler asks for
#     order                identity of the order that these must give; null: they give it by themselves
#
# After it comes a line for each step that the guard has left out, and for each after which the run has gone back:
#
#     left_out, went_back  step, epoch, position at which it begins, size, and why; and the step and the sampler
#                          state to which the run has gone back
#
# The command line writes all of a line, and `ddp.fit` what it knows. An order or a sharding that is an object of the
# program cannot be written. Then `where` finds another identity of the order than the one here, and says so.

_WORDS: dict[type, str] = {Fixed: "fixed", Permutation: "permutation"}


def note_start(run_dir: Path, start: Mapping[str, Any], *, goes_on: bool) -> None:
    """Writes a line, after those of the resumed run; one about a step that the guard left out, too."""
    path = run_dir / STARTS
    noted = "".join(f"{line}\n" for line in (lines_of(path) if goes_on else ()))
    write_whole(path, f"{noted}{to_json(start, default=int)}\n")  # of NumPy's


def note_generation(run_dir: Path, state: TrainState) -> None:
    """Writes a line about the workers that go on with a run, whose start a command has noted."""
    starts = [start for line in lines_of(run_dir / STARTS) if "settings" in (start := json_object(line))]
    if starts:
        settings = starts[-1]["settings"]
        cluster, size = settings["cluster"], state.comm.world_size
        count = {"workers": size, "local_workers": None, "min_workers": min(size, cluster["min_workers"])}
        settings = {**settings, "cluster": {**cluster, **count}}  # on any host, and perhaps too few, which wait
        position = {"step": state.step, "sampler": state.sampler.state_dict()}
        note_start(run_dir, {**starts[-1], "position": position, "settings": settings}, goes_on=True)


def note_start_of_fit(
    run_dir: Path,
    source: Source,
    state: TrainState,
    length: Training,
    batches: Batches,
    validation_data: Any,
    *,
    goes_on: bool,
) -> None:
    """Notes the start of a run that was made from Python. On rank 0 only.

    Args:
        length, batches, validation_data: the arguments of the fit.
        goes_on: the run is one that was resumed.
    """
    samples, sampler = _whole(source.samples), state.sampler
    sizes = getattr(samples, "file_sizes", None)
    data = {
        "name": "digits",  # any, because `dealt` stands for the samples
        "order": _WORDS.get(type(batches.order), "auto"),
        "sharding": batches.sharding if isinstance(batches.sharding, str) else "auto",
        "skip_steps": list(batches.skip_steps or ()),
        "validation": validation_data if isinstance(validation_data, float) else None,
    }
    parts = {"num_shards": sampler.num_shards, "micro_size": sampler.micro_size}
    settings = {
        "seed": batches.seed,
        "epochs": length.epochs,
        "max_steps": length.max_steps,
        "cluster": {"workers": state.comm.world_size},
        "batch": _batch(sampler.sizes.setting) | parts,
        "loader": {"num_workers": source.num_workers},
        "data": data,
    }
    start = {
        "folder": str(Path.cwd()),
        "position": {"step": state.step, "sampler": sampler.state_dict()} if goes_on else None,
        "settings": settings,
        "dealt": {"num_samples": len(samples)} | ({} if sizes is None else {"file_sizes": np.asarray(sizes).tolist()}),
        "order": sampler.order.identity,
    }
    note_start(run_dir, start, goes_on=goes_on)


def _whole(samples: Any) -> Any:
    """Returns the data set of which a share may have been set apart."""
    part = selection_in(samples)
    return samples if part is None else part.samples


def _batch(setting: Any) -> dict[str, Any]:
    """Returns the global batch, or how it grows, as `Steps.setting` has it, in the words of the settings."""
    if isinstance(setting, int):
        return {"global_size": setting}
    if isinstance(setting, list) and len(setting) == 3:
        return {"warmup_size": setting[0], "global_size": setting[1], "warmup_samples": setting[2]}
    return {}  # a budget of tokens, which has its own order


# --- The last calls of a rank that fails ------------------------------------------------------------------------------


@contextmanager
def calls_left(run_dir: Path | None, comm: Communicator) -> Iterator[None]:
    """Leaves this rank's last calls in RUN_DIR/logs/calls-rank-R.jsonl if the block fails and the error is no user's.

    Args:
        run_dir: None: nothing is written.
    """
    try:
        yield
    except Exception as error:
        if run_dir is not None and not isinstance(error, USER_ERRORS):
            path = run_dir / "logs" / f"calls-rank-{comm.rank}.jsonl"
            with if_possible(path):
                make_folder(path.parent)
                write_whole(path, "".join(f"{to_json(call)}\n" for call in comm.recent_calls()))
        raise
