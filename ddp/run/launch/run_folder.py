"""The folder of a run, before a worker starts: who may write it, what an earlier run left there, and config.yaml.

    RUN_DIR/config.yaml      every setting, as `ddp.run.settings.config` has it; it exists once a run was prepared here
            starts.jsonl     each start of the run: the settings, the position that it resumed from, and
                             `sampling.sampler_facts` of the user's own data
            metrics.jsonl, summary.json, curves.png, logs/, checkpoints/      what workers and launcher write
            .lock            while a process writes here: see `files.hold`

`prepare` refuses what cannot work: a folder that another run holds, a full disk, settings that contradict, missing
data, a checkpoint of another model. So a run that starts has passed every check that one process can make.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ddp.errors import ConfigError
from ddp.process import files
from ddp.process.arguments import setting_for
from ddp.process.terminal import log
from ddp.run.settings.address import check_trust, own_parts
from ddp.run.settings.checks import resolve
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain, read_settings, settings_of


def prepare(config: Config, run_dir: Path, *, local_workers: int | None = None, is_restart: bool = False) -> None:
    """Refuses everything that can be refused before a worker starts; then writes RUN_DIR/config.yaml.

    Args:
        config: gets its run directory and every derived value.
        run_dir: exists.
        local_workers: workers on this host; None: all, which this process starts.
        is_restart: the run in the folder is this one.

    Raises:
        ConfigError, CheckpointError, ReplicaMismatch: the run cannot work; the message has the remedy.
    """
    from ddp.run.assembly.stages import check

    config.run.dir, config.run.name = str(run_dir), config.run.name or run_dir.name
    if not is_restart:
        _refuse_reuse(config, run_dir)
    _refuse_planted(run_dir)
    _try_writing(run_dir)
    resolve(config, local_workers=local_workers, num_shards=_earlier_num_shards(config, run_dir))
    position, dealt = check(config)
    for stale in (run_dir / "summary.json", *run_dir.glob("logs/error-*.json")):
        stale.unlink(missing_ok=True)  # they say how the attempt that is being resumed ended
    text, path = settings_text(config), run_dir / "config.yaml"
    if not path.is_file() or path.read_bytes() != text.encode():
        files.write_whole(path, text)
    _note_start(config, run_dir, position, dealt)
    for parent in run_dir.absolute().parents[:3]:  # Hydra has made the folder: runs/NAME, or runs/SWEEP/JOB
        files.flush_folder(parent)


def settings_text(config: Config) -> str:
    """Returns the content of config.yaml."""
    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    return text


def _note_start(
    config: Config, run_dir: Path, position: Mapping[str, Any] | None, dealt: Mapping[str, Any] | None
) -> None:
    """Adds a line to starts.jsonl, from which `commands/where.py` knows the settings of every step."""
    from ddp.train.reports.history import note_start  # torch, which is imported by now

    start = {"folder": str(Path.cwd()), "position": position, "settings": asdict(config), "dealt": dealt}
    note_start(run_dir, start, goes_on=config.resume != "none")


def continued(config: Config, overrides: Sequence[str], run_dir: Path) -> Config:
    """Returns the settings of the run that is resumed, with this command line's on top.

    Without a run to resume, or if it has no settings because it was made from Python, `config` is returned as it is.
    """
    path = _earlier_settings(config, run_dir)
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if path is None or "recipe" in keys:
        return config
    try:
        plain, now = read_settings(path), asdict(config)
    except ConfigError as error:
        if config.resume == "auto":
            raise
        log.warning("%s", str(error).partition(". The checkpoints")[0] + "; this command line's settings are taken")
        return config
    if config.resume != "auto":
        code = plain["run"]["code"]
        plain.update({group: now[group] for group in ("run", "init_from")})  # it continues elsewhere, from a checkpoint
        plain["run"]["code"] = code
    derived = {"cluster": ["local_workers", "spec", "task", "role"], "batch": ["num_shards"]}
    if "cluster.workers" in keys:
        derived["cluster"].append("threads_per_worker")
    if "strategy" in keys:
        derived["cluster"].append("servers")
    for group, names in derived.items():
        plain[group].update({name: now[group][name] for name in names})
    for *above, name in (key.split(".") for key in keys if not key.startswith("hydra.")):
        source, target = now, plain
        for group in above:
            source, target = source[group], target[group]
        target[name] = source[name]
    plain["trust"] = config.trust  # this command line's alone
    found = from_plain(plain)
    check_trust(own_parts(plain), code=found.run.code, settings=path, trust=config.trust)
    return found


def forget_trial(run_dir: Path) -> None:
    """Removes the files that mark a run, so that a run, or the next trial, may use the folder's name."""
    from ddp.train.reports.history import STARTS

    for name in ("config.yaml", STARTS):
        (run_dir / name).unlink(missing_ok=True)


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes from writing there for the duration of the block.

    After an error in the block, a folder that is empty is removed again.

    Raises:
        ConfigError: another run writes it: that run's launcher, or its rank 0, which may outlive the launcher.
    """
    files.refuse_unwritable_name(run_dir)
    try:
        with contextlib.ExitStack() as held:
            try:
                files.make_folder(run_dir)
                held.enter_context(contextlib.closing(files.hold(run_dir)))
                if (run_dir / "checkpoints").is_dir():
                    files.hold(run_dir / "checkpoints").close()
            except OSError as error:
                raise unwritable(run_dir, error) from error
            yield
    except Exception:
        with contextlib.suppress(OSError):
            run_dir.rmdir()
        raise


def unwritable(folder: Path | str, error: OSError) -> ConfigError:
    """Returns the error for a folder in which nothing can be written."""
    reason = error.strerror or str(error)
    remedy = "make room there, or take another with run.name, sweep.name, or hydra.run.dir=FOLDER"
    return ConfigError(f"run directory {folder}: {reason}; {remedy}")


def _refuse_reuse(config: Config, run_dir: Path) -> None:
    """Raises ConfigError if the folder holds a run that this one does not continue."""
    path = run_dir / "config.yaml"
    if not path.exists() or config.resume == "auto" or _is_of_trial(path):
        return
    if config.resume != "none" and Path(config.resume).resolve().is_relative_to(run_dir.resolve()):
        return
    raise ConfigError(
        f"{setting_for(run_dir, config.run.name)}: {run_dir} holds a run; continue it with resume=auto, or take another"
    )


def _is_of_trial(path: Path) -> bool:
    """Returns True for a config.yaml that a killed trial has left."""
    with contextlib.suppress(ConfigError):
        return bool(read_settings(path).get("trial"))
    return False


def _refuse_planted(run_dir: Path) -> None:
    """Raises ConfigError for a link or the like in the place of what workers will open; see `process/files.py`."""
    for folder in (run_dir / "logs", run_dir / "checkpoints"):
        files.refuse_others_link(folder)
    for path in (run_dir / "metrics.jsonl", *run_dir.glob("logs/*.log")):
        if path.exists() or path.is_symlink():
            files.to_read(path).close()


def _try_writing(run_dir: Path) -> None:
    """Writes as much as a small run will, because a full disk should be found now and not at the first checkpoint."""
    trial = run_dir / ".trial"
    try:
        with files.new_file(trial) as stream:
            stream.write(os.urandom(8 << 20))  # random, because a file system may compress
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise unwritable(run_dir, error) from error
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)


def _earlier_num_shards(config: Config, run_dir: Path) -> int | None:
    """Returns the number of shards of the run that this one resumes, because random streams depend on it."""
    if (path := _earlier_settings(config, run_dir)) is not None:
        with contextlib.suppress(ConfigError):  # its checkpoints do not need it; `restore` says what differs
            return from_plain(read_settings(path)).batch.num_shards
    return None


def _earlier_settings(config: Config, run_dir: Path) -> Path | None:
    """Returns the config.yaml of the run that this one resumes, or None if there is none."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        return run_dir / "config.yaml" if (run_dir / "config.yaml").exists() else None
    return settings_of(Path(config.resume))
