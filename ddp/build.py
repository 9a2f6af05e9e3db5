"""A run: checked before any worker starts, made by every worker, and completed afterwards.

    check(config)            in the parent, before any worker: fetches data, builds the model without memory, looks at
                             the checkpoint to be resumed; so one process says once what is wrong
    run(config, run_dir)     in every worker: communicator, data, model, optimizer, fit; rank 0 writes summary.json
    finish(config, run_dir)  in the parent, afterwards: yardsticks, curves.png, the table

Read before: `components.py`. Read next: `under_torchrun.py`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ddp import components
from ddp import config as settings
from ddp.clock import now_s
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.comm.setup import init, shutdown
from ddp.config import Config
from ddp.config_checks import available_cores
from ddp.data import standard_library, streams
from ddp.data.sampler import TrainSampler
from ddp.data.splits import Splits
from ddp.errors import CheckpointError, ConfigError
from ddp.files import write_whole
from ddp.garbage import collect_from_now_on
from ddp.log import log
from ddp.replica.replica import Replica
from ddp.tasks import ngram
from ddp.train.callbacks import MetricsFile, ThroughputMeter
from ddp.train.checkpoint import Checkpointer, check_optimizer, read_checkpoint, restore, software_identity
from ddp.train.checkpoint_store import CheckpointStore
from ddp.train.evaluate import evaluate
from ddp.train.fit import continue_fit, last_step
from ddp.train.initial_weights import check_fits, load_initial_weights
from ddp.train.progress import ProgressBar
from ddp.train.report import draw_curves, print_summary
from ddp.train.state import TrainState
from ddp.train.stopping import StopFlag
from ddp.train.stored_checkpoint import load, steps
from ddp.wording import counted, setting_for, train_command

# ------------------------------------------------------------------------------------------- the three entry points


def check(config: Config) -> None:
    """Finds out in one process, before any worker starts, whether the run can work.

    Raises:
        ConfigError: data are missing, or the model cannot be built.
        CheckpointError: the checkpoint to resume, or the weights to start from, do not fit.
    """
    splits = components.load_data(config, download=True)
    with torch.device("meta"):
        model = components.make_model(config, splits)
    if (which := resume_from(config, Path(config.run.dir))) is not None:
        checkpoint = load(which, names=["model"])
        check_fits(checkpoint.parts["model"], model, source=checkpoint.path)
        check_optimizer(checkpoint, components.make_optimizer(config, model))
    elif config.init_from.path:
        _load_given_weights(config, components.make_model(config, splits))


def run(config: Config, run_dir: Path) -> None:
    """Runs as one worker: joins the others, trains, leaves."""
    torch.set_num_threads(config.cluster.threads_per_worker or 1)
    torch.use_deterministic_algorithms(config.deterministic)
    comm = init(
        device=config.device,
        backend=config.backend,
        algorithm=config.comm.algorithm,
        order=config.comm.order,
        shared_memory=config.comm.shared_memory,
        debug=config.comm.debug,
        segment_bytes=config.comm.segment_bytes,
        warn_s=config.comm.warn_s,
        abort_s=config.comm.abort_s,
    )
    stop = StopFlag()
    try:
        with stop.listening():
            _train(config, run_dir, comm, stop)
    except BaseException as error:
        shutdown(failed=f"{type(error).__name__}: {error}")
        raise
    shutdown()


def finish(config: Config, run_dir: Path) -> None:
    """Completes the results that the workers wrote, and prints them."""
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    if isinstance(config.data, settings.StandardLibrary) and not summary["stopped_by"]:
        summary |= _yardsticks()
        write_whole(path, json.dumps(summary, indent=2) + "\n")
    main_metric = f"test_{components.make_task(config).main_metric}"
    draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png", main_metric=main_metric, summary=summary)
    print_summary(summary, run_dir, next_commands=_next_commands(config, summary, run_dir))


# --------------------------------------------------------------------------------------------------- a worker's life


def _train(config: Config, run_dir: Path, comm: Communicator, stop: StopFlag) -> None:
    splits, task = components.load_data(config), components.make_task(config)
    _check_data(config, splits, comm)
    streams.init_stream(config.seed, device=comm.device)
    module = components.make_model(config, splits).to(comm.device)
    resumed = on_rank_zero(comm, lambda: resume_from(config, run_dir), label="looking for a checkpoint")
    if config.init_from.path and resumed is None and comm.rank == 0:  # the replicas' first broadcast does the rest
        _load_given_weights(config, module)
    model = components.make_replica(config, module, comm)
    optimizer = components.make_optimizer(config, module)
    sampler = TrainSampler(
        len(splits.train),
        global_batch=config.batch.global_size,
        rank=comm.rank,
        world_size=comm.world_size,
        num_shards=config.batch.num_shards,
        micro_size=config.batch.micro_size,
        seed=config.seed,
    )
    state = TrainState(comm, model, optimizer, sampler)
    run_identity = identity(config, comm, model)
    store = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        best="max" if task.higher_is_better else "min",
    )
    if resumed is not None:
        restore(read_checkpoint(comm, resumed), state, identity=run_identity)
    num_steps = last_step(state, epochs=config.epochs, max_steps=config.max_steps)
    headline = _headline(config, comm, module, sampler, num_steps, state.step)
    log.info("%s", headline)
    if comm.rank == 0:
        print(headline, flush=True)

    collect_from_now_on()  # the optimizer has imported the last of torch
    meter = ThroughputMeter()
    score_metric = f"test_{task.main_metric}"
    start_s = now_s()
    continue_fit(
        state,
        task,
        splits.train,
        epochs=config.epochs,
        max_steps=config.max_steps,
        schedule=components.make_schedule(config, num_steps),
        clip_norm=config.clip_norm,
        precision=config.precision,
        loader_workers=config.loader.num_workers,
        evaluation=lambda state: _evaluation(config, state, task, splits, stop),
        evaluate_every_epochs=config.evaluate.every_epochs,
        evaluate_every_steps=config.evaluate.every_steps,
        callbacks=[
            meter,
            MetricsFile(run_dir / "metrics.jsonl", meter, every=config.log_every),
            Checkpointer(
                store,
                identity=run_identity,
                every_steps=config.checkpoint.every_steps,
                score_metric=score_metric,
            ),
            ProgressBar(  # last: it shows what is saved already
                meter, num_steps=num_steps, num_epochs=config.epochs, if_long=_if_long(config, run_dir)
            ),
        ],
        stop=stop,
    )
    if comm.rank == 0:
        _write_summary(run_dir, config, state, meter, seconds=now_s() - start_s)


def _check_data(config: Config, splits: Splits, comm: Communicator) -> None:
    """Raises ConfigError, with hosts, unless all workers have loaded the same data: hosts need not share a disk."""
    num_train, num_test = len(splits.train), len(splits.test)
    mine = f"{splits.name}: {num_train:,} + {num_test:,} samples of {splits.sample_shape}, {splits.num_classes} classes"
    found: dict[str, list[str]] = {}
    for host, theirs in all_gather_object(comm, (socket.gethostname(), mine)):
        found.setdefault(theirs, []).append(host)
    if len(found) > 1:
        each = "; ".join(f"on {', '.join(sorted(set(hosts)))}: {theirs}" for theirs, hosts in found.items())
        raise ConfigError(
            f"data={config.data.name} is not the same on all hosts ({each}); copy one host's data to the others"
        )


def _evaluation(
    config: Config, state: TrainState, task: Any, splits: Splits, stop: StopFlag
) -> dict[str, float] | None:
    means = evaluate(
        state.model,
        task,
        splits.test,
        comm=state.comm,
        batch_size=config.loader.evaluation_batch,
        num_workers=config.loader.num_workers,
        precision=config.precision,
        stop=stop,
    )
    if means is None:
        return None
    log.info("step %d: %s", state.step, ", ".join(f"{name} {value:.4f}" for name, value in means.items()))
    return {f"test_{name}": value for name, value in means.items()}


def _write_summary(run_dir: Path, config: Config, state: TrainState, meter: ThroughputMeter, *, seconds: float) -> None:
    whole = meter.whole
    summary = {
        **state.evaluation,
        "world_size": state.comm.world_size,
        "threads_per_worker": torch.get_num_threads(),
        "device": str(state.comm.device),
        "all_reduce": state.comm.auto.describe(),
        "choices": {str(nbytes): way for nbytes, way in sorted(state.comm.auto.choices.items())},
        "global_batch": config.batch.global_size,
        "num_parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "steps": state.step,
        "epochs": round(state.epochs_done, 2),
        "samples_per_s": round(whole.samples_per_s, 1),
        "compute_fraction": round(whole.compute_fraction, 4),
        "wait_fraction": round(whole.wait_fraction, 4),
        "data_fraction": round(whole.data_fraction, 4),
        "train_loss": state.train_loss,
        "seconds": round(seconds, 2),
        "stopped_by": state.stopped_by or None,
    }
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


def _headline(
    config: Config, comm: Communicator, module: nn.Module, sampler: TrainSampler, num_steps: int, first: int
) -> str:
    """Returns everything that was derived, in three lines."""
    micros = next(iter(sampler.plans())).micros
    largest = max((len(micro.indices) for micro in micros), default=0)
    rate = components.learning_rate(config)
    scaled = "" if rate == config.optim.lr else f" ({config.optim.lr:g} × {rate / config.optim.lr:g} for this batch)"
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    start = f", continuing after step {first:,}" if first else ""
    lines = [
        f"{counted(comm.world_size, 'worker')} × {counted(torch.get_num_threads(), 'thread')} on {comm.device}, "
        f"{config.model.name} with {num_parameters:,} parameters, {config.replica.kind} gradients, "
        f"all-reduce: {comm.auto.describe()}",
        f"global batch {sampler.global_batch} in {counted(sampler.num_shards, 'shard')}; worker 0: "
        f"{counted(len(micros), 'forward')} of up to {counted(largest, 'sample')} a step; "
        f"learning rate {rate:g}{scaled}",
        f"{counted(sampler.length, 'training sample')}, {counted(sampler.num_steps_per_epoch, 'step')} per epoch, "
        f"{counted(num_steps, 'step')}{start}",
    ]
    return "\n".join(lines)


def identity(config: Config, comm: Communicator, model: Replica) -> dict[str, Any]:
    """Returns what the bits of the result depend on, apart from the code; every checkpoint has it."""
    plain = asdict(config)
    return {
        **software_identity(),
        "world_size": comm.world_size,
        "device": comm.device.type,
        "all_reduce": comm.auto.describe(),
        "bucket_layout": model.bucket_layout,
        **{key: plain[key] for key in ("seed", "batch", "precision", "clip_norm", "deterministic")},
        **{key: plain[key] for key in ("data", "model", "optim", "schedule", "epochs", "max_steps")},
    }


# ---------------------------------------------------------------------------------------------- where to start from


def resume_from(config: Config, run_dir: Path) -> Path | None:
    """Returns the checkpoint, or folder of checkpoints, to resume from; None for a fresh start.

    Raises:
        CheckpointError: `resume` names a path without a checkpoint.
    """
    if config.resume == "none":
        return None
    if config.resume == "auto":
        folder = run_dir / "checkpoints"
        return folder if steps(folder) else None
    path = Path(config.resume)
    if not path.exists():
        raise CheckpointError(f"resume={path} does not exist; give a run folder, a checkpoint in it, or resume=auto")
    return _checkpoints_of(path)


def _checkpoints_of(path: Path) -> Path:
    """Returns the checkpoints of a run, if `path` is its folder, or else `path` itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _load_given_weights(config: Config, module: nn.Module) -> None:
    start = config.init_from
    path = _checkpoints_of(Path(cast(str, start.path)))
    load_initial_weights(path, module, strict=start.strict, rename=start.rename, skip=start.skip)


# ------------------------------------------------------------------------------------------------------ at the end


def _yardsticks() -> Mapping[str, float]:
    """Returns what simple models of bytes reach on the same held-out text, in bits per byte."""
    text = standard_library.corpus()
    orders = {"bigram": 2, "trigram": 3, "5-gram": 5}
    found = {
        f"yardstick_{name}": ngram.ngram_bits_per_byte(text.train, text.held_out, order=order)
        for name, order in orders.items()
    }
    return {**found, "yardstick_xz": ngram.xz_bits_per_byte(text.train, text.held_out)}


def _next_commands(config: Config, summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Returns commands that continue a run that was stopped, or that work here after a first run."""
    this_run = setting_for(run_dir, config.run.name)
    if summary["stopped_by"]:
        return [train_command(this_run, "resume=auto")]
    if not this_run.startswith("run.name="):  # a sweep's job
        return []
    on_gpu = str(summary["device"]).startswith("cuda")
    most = min(8, torch.cuda.device_count() if on_gpu else max(2, available_cores()))
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    sweep = [train_command("-m", f"cluster.workers={','.join(map(str, counts))}")] if len(counts) > 1 else []
    is_text = isinstance(config.data, settings.StandardLibrary)
    return [*sweep, *([] if is_text else [train_command("recipe=gpt")])]


def _if_long(config: Config, run_dir: Path) -> str:
    """Returns what to tell a user whose run will take long."""
    ends = {"epochs": config.epochs, "max_steps": config.max_steps}
    shorter = " or ".join(f"{key} (now {value:,})" for key, value in ends.items() if value is not None)
    workers, threads = config.cluster.local_workers or config.cluster.workers, config.cluster.threads_per_worker or 1
    could_be = available_cores() // threads
    more = f"; cluster.workers={could_be} would use all cores" if workers < could_be else ""
    go_on = f"{setting_for(run_dir, config.run.name)} resume=auto"
    return f"To shorten it, lower {shorter}{more}. Ctrl-C saves it, and {go_on} continues it."
