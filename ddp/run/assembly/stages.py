"""A run: checked before any worker starts, executed by every worker, and completed afterwards.

check(config)            in the parent, before any worker: fetches data, builds the model without memory, looks at
                         the checkpoint to be resumed; so one process reports each error once
run(config, run_dir)     in every worker: data, model, optimizer; communicator, fit; rank 0 writes summary.json
finish(config, run_dir)  in the parent, afterwards: the table, and of a GPT yardsticks and what it writes
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.membership import is_resized
from ddp.comm.meeting.place import all_have_one_launcher
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.comm.opening import show_only
from ddp.comm.session import init, shutdown
from ddp.data.orders.steps import Steps
from ddp.data.samples import Splits
from ddp.data.sets.text_sets import corpus
from ddp.errors import CheckpointError, ConfigError, safe_str
from ddp.models import GPT, generate
from ddp.process import gpu, streams
from ddp.process.arguments import program, relative_path, setting_for, train_command, typed_settings
from ddp.process.memory import available_cores, collect_from_now_on
from ddp.process.records import damage_as_error
from ddp.process.terminal import say
from ddp.replica.broadcast import move
from ddp.replica.replica import Replica
from ddp.run.assembly import components
from ddp.run.assembly.load import load as load_trained
from ddp.run.assembly.load import load_initial_weights
from ddp.run.assembly.sampling import batches_of, check_sampling, sampler_facts, sampler_for
from ddp.run.settings.address import origins
from ddp.run.settings.checks import check_servers, check_strategy
from ddp.run.settings.config import Config, folder_of
from ddp.strategies.choice import same_bits_as
from ddp.strategies.region import refuse_kept
from ddp.train.arguments import FitArguments
from ddp.train.checkpoints.checkpoint import check_optimizer
from ddp.train.checkpoints.checkpoint_store import ANOTHER, check_fits, checkpoints_of, load, resume_from
from ddp.train.fit import train
from ddp.train.reports.profile import FILE
from ddp.train.reports.report import draw_curves, print_summary
from ddp.train.reports.results import read_summary, write_summary
from ddp.train.sidecar import results_of_sidecar
from ddp.train.steps.callbacks import EARLY, MEASURED
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Task, ngram_bits_per_byte, xz_bits_per_byte

# ------------------------------------------------------------------------------------------- the three entry points


def check(config: Config) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Checks in one process, before any worker starts, that the run can work.

    Returns:
        Step and sampler's state of the checkpoint that the run resumes from, None for a new run; and
        `sampling.sampler_facts`.

    Raises:
        ConfigError: data are missing, or the model or its optimizer cannot be built.
        CheckpointError: the checkpoint to resume, or the weights to start from, do not fit.
    """
    components.add_own_algorithm(config, check=True)
    splits = components.load_data(config, download=True)
    components.check_loss(config, splits)
    components.check_transform(config, splits)
    components.check_callbacks(config)
    if config.evaluate.by == "sidecar" and not len(splits.validation or splits.test or ()):
        raise ConfigError(f"evaluate.by=sidecar: data={config.data.name} have no held-out samples; leave it out")
    model = components.synchronised(config, components.make_model_without_memory(config, splits))
    check_strategy(config, model)
    check_servers(config, model)
    if (region := components.averaging_of(config).region) is not None:
        refuse_kept(region)
    with components.without_compiler():
        optimizer = components.make_optimizer(config, model)
    if (which := _start_of(config, Path(config.run.dir))) is not None:
        checkpoint = load(which, names=["model", "position"])
        with damage_as_error(checkpoint.path, ANOTHER, CheckpointError):
            position = {name: checkpoint.parts["position"][name] for name in ("step", "sampler")}
            check_fits(checkpoint.parts["model"], model, source=checkpoint.path)
        check_sampling(config, splits, state=position["sampler"])
        check_optimizer(checkpoint, optimizer)
        return position, sampler_facts(config, splits.train)
    check_sampling(config, splits)
    if config.init_from.path:
        _load_given_weights(config, components.make_model(config, splits))
    return None, sampler_facts(config, splits.train)


def run(config: Config, run_dir: Path) -> None:
    """Runs as one worker: loads, joins the others, trains, leaves."""
    stop = StopFlag()
    _prepare_process(config)
    try:
        parts = loaded(config)
    except Exception as error:
        if not all_have_one_launcher():  # else it ends the others, who wait for this one
            with suppress(Exception), _joined(config):
                raise error  # in there, so that the others are told
        raise
    with _joined(config), stop.listening():
        train(replace(fit_arguments(config, run_dir, parts, stop), folder=folder_of(config, run_dir)))


@contextmanager
def joined(config: Config) -> Iterator[Communicator]:
    """Yields the communicator of the run's workers; notifies them at the end if this one has failed."""
    _prepare_process(config)
    with _joined(config) as comm:
        yield comm


def _prepare_process(config: Config) -> None:
    if config.cluster.devices is not None:
        show_only(config.cluster.devices)
    torch.set_num_threads(config.cluster.threads_per_worker or 1)
    torch.use_deterministic_algorithms(config.deterministic)
    components.add_own_algorithm(config)


@contextmanager
def _joined(config: Config) -> Iterator[Communicator]:
    comm = init(device=config.device, backend=config.backend, **asdict(config.comm))
    try:
        yield comm
    except BaseException as error:
        shutdown(failed=f"{type(error).__name__}: {safe_str(error)}")
        raise
    shutdown()


def finish(config: Config, run_dir: Path) -> None:
    """Completes the results that the workers wrote, and prints them."""
    if config.trial:
        return
    summary = read_summary(run_dir)
    more: dict[str, Any] = {}
    if config.evaluate.by == "sidecar":
        more |= results_of_sidecar(run_dir, summary["main_metric"], last_step=summary["steps"])
    if config.data.name == "standard_library" and summary["stopped_by"] in (None, EARLY):
        more |= {**_yardsticks(), "writes": _written_by(config, run_dir)}
    if more:
        summary = {**more, **summary, **more}  # metrics first, as in the table
        write_summary(run_dir, summary)
        if config.report.curves:  # once more, with what is new
            draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png", summary=summary)
    print_summary(summary, run_dir, next_commands=_next_commands(config, summary, run_dir))


# --------------------------------------------------------------------------------------------------- a worker's life


class Parts(NamedTuple):
    """The parts of a run that a worker makes by itself, before it joins the others.

    Attributes:
        module: the bare model, on the CPU; optimizer: over its parameters.
        sizes: of the steps, over all ranks.
    """

    splits: Splits
    task: Task
    module: nn.Module
    optimizer: Optimizer
    sizes: Steps


def loaded(config: Config) -> Parts:
    """Loads the data, and makes the model and the optimizer."""
    splits = components.load_data(config)
    task = components.make_task(config, splits)
    streams.init_stream(config.seed, device="cpu")
    module = components.synchronised(config, components.make_model(config, splits))
    optimizer = components.make_optimizer(config, module)
    sizes = sampler_for(config, splits, rank=0).sizes  # one of several servers has no share
    collect_from_now_on()  # the optimizer has imported the last of torch
    return Parts(splits, task, module, optimizer, sizes)


def replica_of(config: Config, run_dir: Path, parts: Parts, comm: Communicator) -> Replica:
    """Returns the model as a replica of these ranks: at the start, and whenever others go on with the run. Collective.

    Raises:
        ConfigError: hosts have different data.
    """
    module, optimizer = parts.module, parts.optimizer
    _check_data(config, parts.splits, comm)
    if not is_resized():
        with streams.preserved():  # the CPU's generators, which have made the model: a GPU's begins where they began
            streams.init_stream(config.seed, device=comm.device)
        resumed = on_rank_zero(comm, lambda: _start_of(config, run_dir), label="looking for a checkpoint")
        if config.init_from.path and resumed is None and comm.rank == 0:  # the replicas' first broadcast does the rest
            _load_given_weights(config, module)
        if comm.rank == 0 and (notes := [*origins(), *components.derived(config, parts.sizes)]):
            say("\n".join(notes))
    replica = components.make_replica(config, move(module, comm.device), comm)
    if optimizer.state:  # some make it at once, as Adagrad does: it follows the parameters to their device
        optimizer.load_state_dict(optimizer.state_dict())
    return replica


def fit_arguments(config: Config, run_dir: Path, parts: Parts, stop: StopFlag) -> FitArguments:
    """Returns the arguments of `ddp.fit` for the settings, except the folder."""
    splits, task, module, optimizer, sizes = parts
    held_out = splits if config.evaluate.by == "workers" else None
    return FitArguments(
        model=module,
        replica=partial(replica_of, config, run_dir, parts),
        data=splits.train,
        optimizer=optimizer,
        loss=task,
        global_batch=components.batch_of(config, splits.train),
        epochs=config.epochs,
        max_steps=config.max_steps,
        validation_data=held_out and held_out.validation,
        test_data=held_out and held_out.test,
        evaluation=config.evaluate,
        batches=batches_of(config, splits),
        reading=config.loader,
        schedule=components.make_schedule(config, sizes),
        clip_norm=config.clip_norm,
        precision=config.precision,
        strategy=replace(components.averaging_of(config), units=None),  # which the replica has
        same_bits=config.same_bits,
        callbacks=components.make_callbacks(config),
        stop=stop,
        settings=bits_depend_on(config, splits),
    )


def bits_depend_on(config: Config, splits: Splits) -> dict[str, Any]:
    """Returns the settings that the bits of the result depend on, and the facts that the model was built from."""
    plain = asdict(config)
    keys = ("seed", "batch", "precision", "clip_norm", "deterministic", "data", "model", "loss", "optim", "schedule")
    facts = {"sample_shape": splits.sample_shape and list(splits.sample_shape), "num_classes": splits.num_classes}
    synchronised = {"sync_batchnorm": True} if config.replica.sync_batchnorm else {}
    reading = {"max_unreadable": config.loader.max_unreadable, "debug": config.loader.debug}
    chosen = {key: plain[key] for key in (*keys, "epochs", "max_steps")}
    chosen["strategy"] = {**asdict(config.strategy), "name": same_bits_as(config.strategy.name)}
    chosen["strategy"].pop("region", None)
    chosen |= {"callbacks": config.callbacks} if config.callbacks else {}
    if config.same_bits.on:
        chosen |= {"same_bits": True, "wire": config.replica.wire}
    return {**chosen, "loader": reading, **facts, **synchronised}


def _check_data(config: Config, splits: Splits, comm: Communicator) -> None:
    """Raises ConfigError, with hosts, unless all workers have loaded the same data: hosts need not share a disk."""
    sides = [each for each in (splits.train, splits.validation, splits.test) if each is not None]
    numbers = " + ".join(f"{len(each):,}" for each in sides)
    mine = f"{splits.name}: {numbers} samples of {splits.sample_shape}, {splits.num_classes} classes"
    found: dict[str, list[str]] = {}
    for host, theirs in all_gather_object(comm, (socket.gethostname(), mine)):
        found.setdefault(theirs, []).append(host)
    if len(found) > 1:
        each = "; ".join(f"on {', '.join(sorted(set(hosts)))}: {theirs}" for theirs, hosts in found.items())
        raise ConfigError(
            f"data={config.data.name} is not the same on all hosts ({each}); copy one host's data to the others"
        )


# ---------------------------------------------------------------------------------------------- where to start from


def _start_of(config: Config, run_dir: Path) -> Path | None:
    """Returns the checkpoint, or folder of checkpoints, to resume from; None for a fresh start."""
    return None if config.resume == "none" else resume_from(config.resume, run_dir)


def _load_given_weights(config: Config, module: nn.Module) -> None:
    start = config.init_from
    path = checkpoints_of(Path(cast(str, start.path)))
    load_initial_weights(path, module, strict=start.strict, rename=start.rename, skip=start.skip)


# ------------------------------------------------------------------------------------------------------ at the end


def _yardsticks() -> Mapping[str, float]:
    """Returns the bits per byte of simple models on the same held-out text."""
    text = corpus()
    orders = {"bigram": 2, "trigram": 3, "5-gram": 5}
    found = {
        f"yardstick_{name}": ngram_bits_per_byte(text.train, text.held_out, order=order)
        for name, order in orders.items()
    }
    return {**found, "yardstick_xz": xz_bits_per_byte(text.train, text.held_out)}


def _written_by(config: Config, run_dir: Path) -> str:
    """Returns a few lines that the trained model writes, or "" for a model of the user's own."""
    if config.model.name != "gpt":
        return ""
    model = cast(GPT, load_trained(run_dir, "latest").model())
    prompt = b"\n    def "
    written = generate(model, torch.tensor(list(prompt)), num_tokens=400, temperature=0.7, seed=config.seed)
    return (prompt + bytes(written.tolist())).decode(errors="replace")


def _next_commands(config: Config, summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Returns commands that continue a run that was stopped, or that work here after a first run."""
    this_run = setting_for(run_dir, config.run.name)
    if summary["stopped_by"] not in (None, EARLY, MEASURED):
        return [train_command(this_run, "resume=auto")]
    if not this_run.startswith("run.name="):  # a sweep's job
        return []
    drawing = f"{program()} draw step {shlex.quote(str(relative_path(run_dir)))}"
    draw = [drawing] if (run_dir / FILE).exists() else []
    on_gpu = str(summary["device"]).startswith(gpu.KIND)
    most = min(8, gpu.cuda.device_count() if on_gpu else max(2, available_cores()))
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    elastic = [f"cluster.{name}" for name in ("min_workers", "max_workers", "spares")]  # for one number of workers
    others = ("run.name", "resume", "cluster.workers", "cluster.spec", "cluster.task", "cluster.role")
    typed = typed_settings(*others, *elastic)
    workers = f"cluster.workers={','.join(map(str, counts))}"
    takes_several = config.strategy.name != "one_device" and len(counts) > 1
    sweep = [train_command("-m", workers, *typed)] if takes_several else []
    is_usual = (config.data.name, config.model.name) == ("digits", "cnn")
    return [*draw, *sweep, *([train_command("recipe=gpt")] if is_usual else [])]
