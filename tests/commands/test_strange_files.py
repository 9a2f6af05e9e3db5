"""Whatever the files of a run hold: each reader takes them, or refuses them in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ddp.commands.where import where
from ddp.errors import CheckpointError, ConfigError, printable
from ddp.lab.scaling.figures import compare
from ddp.lab.scaling.runs import _memory, _pairs, read_runs
from ddp.run.assembly.load import load
from ddp.run.launch.failures import Report, Seat
from ddp.run.launch.run_folder import settings_text
from ddp.run.launch.sweep import report_jobs
from ddp.run.settings.config import Config
from ddp.run.settings.reader import LOADER, read_settings
from ddp.train.checkpoints.checkpoint_store import CheckpointStore, digest
from ddp.train.reports.history import read_hashes
from ddp.train.reports.profile import read_profile
from ddp.train.reports.results import evaluations_in, read_metrics
from ddp.train.reports.traces import merged
from ddp.train.sidecar import best_in, has_ended, missing, results_of_sidecar

SUMMARY = {"test_loss": 0.5, "test_accuracy": 0.9, "main_metric": "test_accuracy", "higher_is_better": True}
SUMMARY |= {"world_size": 2, "threads_per_worker": 1, "device": "cpu", "global_batch": 16, "steps": 4, "epochs": 1.0}
SUMMARY |= {"samples_per_s": 9.5, "compute_fraction": 0.5, "train_loss": 0.4, "seconds": 3.0, "stopped_by": None}
SUMMARY |= {"sidecar": {"evaluated": 1, "last_step": 4, "skipped": 0, "missing": []}}
LINES: list[dict[str, Any]] = [
    {"kind": "step", "step": 4, "samples": 64, "epoch": 0, "train_loss": 0.4, "samples_per_s": 9.0},
    {"kind": "step", "step": 5, "samples": 80, "memory_mb/rank_0": 7},
    {"kind": "evaluation", "step": 4, "samples": 64, "order": 1, "weights": "ab", "test_loss": 0.5},
    {"kind": "skipped", "order": 2, "num": 2, "why": "gone"},
]
JOB = {"overrides": ["cluster.workers=2"], "status": 0, "objective": 0.9, "began": 1.0, "ended": 2.0, "pruned": False}
BUCKET = {"index": 0, "bytes": 16, "dtype": "float32", "parameters": ["w"], "shapes": [[2, 2]]}
BUCKET |= {"ready_s": 0.1, "launched_s": 0.1, "done_s": 0.2}
RANK = {"step": 6, "began_s": 0.0, "num_samples": 8, "backward_began_s": 0.1, "buckets": [BUCKET]}
RANK |= {"spans": [["data", 0.0, 0.1]]}
PROFILE = {"version": 1, "model": "Net", "num_parameters": 4, "batch": 16, "world_size": 2, "hosts": [[0, 1]]}
PROFILE |= {"threads": 1, "cores": [2], "device": "cpu", "strategy": "Replicated", "hook": None, "wire": None}
PROFILE |= {"algorithm": "ring", "runs": "in the foreground", "steps": [[RANK, RANK]]}
PROFILE |= {"clock": [{"offset_s": 0.0, "error_s": 0.0}] * 2}
START = {"folder": ".", "position": None, "dealt": {"num_samples": 64}, "settings": {"max_steps": 2}}
SAMPLER = {"seed": 0, "epoch": 0, "consumed": 8}
BAD_STEP = {"went_back": {"step": 2, "position": 8, "size": 8, "to": 1, "sampler": SAMPLER}}
EVENT = {"name": "ddp: mark 0", "ph": "X", "pid": 7, "id": 1, "ts": 1.0, "dur": 2.0}
NAMED = {"ph": "M", "name": "process_name", "args": {"name": "x"}}
TRACE: dict[str, Any] = {"distributedInfo": {"rank": 0, "world_size": 1}}
TRACE |= {"traceEvents": [EVENT, EVENT | {"name": "ProfilerStep#1"}, NAMED]}
TRACE |= {"ddpClock": {"mark": "ddp: mark 0", "mark_s": 1.0, "error_s": 0.0}}
HASHED = [{"step": 1, "identity": {}}, {"step": 1, "names": ["w"]}, {"step": 1, "loss": "0x1p0", "hashes": "0" * 16}]

ODD = [None, True, -1, 0.5, 1 << 70, 10**400, "x", "", "\x1b[2J\nerror: all is well", [], [[]], {}, {"a": None}]
ODD += ["\ud800", float("nan"), float("inf"), json.loads("[" * 99 + "]" * 99), "../../home", 1 << 52, "9" * 99]
BYTES = [b"", b"\0" * 999, b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 99_999, b"- " * 50_000]
BYTES += [b"&a [*a, *a]\n", b"null", b"[]", b"{}\n", b"1e999", b"a: &b [1]\nc: *b\n"]
BYTES += [b"!!python/object/apply:os.system [touch ran]\n"]


def quietly(call: Callable[[], object]) -> object:
    with contextlib.redirect_stdout(io.StringIO()):
        return call()


def lines(*values: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


def report(sweep: Path) -> None:
    runs, _ = read_runs(sweep)
    compare(runs, target=None, goal=0.8)


def figures(metrics: Path) -> None:
    entries = read_metrics(metrics)
    _pairs(entries, "samples_per_s"), _memory(entries), evaluations_in(metrics, {}), best_in(entries, "test_loss", 1.0)


def followed(run: Path) -> None:
    has_ended(run), missing(run), results_of_sidecar(run, "test_loss", last_step=4)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {  # file of a sweep → its content, and what reads it
    "a/config.yaml": (settings_text(Config()), lambda sweep: read_settings(sweep / "a/config.yaml")),
    "a/summary.json": (json.dumps(SUMMARY), lambda sweep: (report_jobs(sweep), report(sweep), followed(sweep / "a"))),
    "a/metrics.jsonl": (lines(*LINES), lambda sweep: figures(sweep / "a/metrics.jsonl")),
    "a/sidecar/metrics.jsonl": (lines(*LINES), lambda sweep: followed(sweep / "a")),
    "a/job.json": (json.dumps(JOB), report_jobs),
    "a/profile.json": (json.dumps(PROFILE), lambda sweep: read_profile(sweep / "a")),
    "a/hashes.jsonl": (lines(*HASHED), lambda sweep: read_hashes(sweep / "a")),
    "a/starts.jsonl": (
        lines(START, BAD_STEP, {**START, "position": {"step": 1, "sampler": SAMPLER}}),
        lambda sweep: where(sweep / "a", step=1, sample=None, epoch=None),
    ),
    "a/logs/error-rank-0.json": (
        json.dumps({"rank": 0, "type": "ValueError", "message": "x", "traceback": "x"}),
        lambda sweep: (found := Report.read(Seat(sweep / "a/logs", 0))) and found.block(),
    ),
    "a/traces/rank-0.json": (json.dumps(TRACE), lambda sweep: merged(sweep / "a/traces")),
    "a/checkpoints/best": ("step-00000001\n", lambda sweep: load(sweep / "a")),
    "a/checkpoints/step-00000001/manifest.json": ("", lambda sweep: (load(sweep / "a").facts, missing(sweep / "a"))),
}


READ_PAST = ("a/job.json", "a/summary.json", "a/logs/error-rank-0.json")
READ_PAST += ("a/metrics.jsonl", "a/sidecar/metrics.jsonl")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    weights = {"model": {"w": torch.ones(2)}, "callbacks": {"EMA": {"module.w": torch.ones(2)}}}
    meta = {"identity": {"sample_shape": [2], "num_classes": 3}, "averages": "EMA"}
    CheckpointStore(folder / "a" / "checkpoints").save(1, weights, meta=meta, score=0.5)
    for name, (text, _) in READERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text:
            (folder / name).write_text(text)
    return folder


def changed(value: Any, drawn: random.Random) -> Iterator[Any]:
    """Yields copies of a tree of JSON with one odd value, or with one value left out."""
    if isinstance(value, dict):
        for key in value:
            yield {name: each for name, each in value.items() if name != key}
            yield from ({**value, key: inner} for inner in changed(value[key], drawn))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from ([*value[:number], inner, *value[number + 1 :]] for inner in changed(each, drawn))
    yield from drawn.sample(ODD, 6)


MOST = int(os.environ.get("DDP_FUZZ", "8"))
"""Damaged values of each file that are drawn, besides `BYTES`; DDP_FUZZ=9999 tries all."""


def texts_of(name: str, text: str) -> list[bytes]:
    """Damaged contents of a file."""
    drawn = random.Random(name)
    if name.endswith("manifest.json"):
        objects = [each for each in changed(json.loads(text), drawn) if isinstance(each, dict)]
        found = [json.dumps({**each, "sha256": digest(each)}) for each in objects]
    elif name.endswith(".jsonl"):
        rows = [*map(json.loads, text.splitlines())]
        found = [lines(*each) for each in changed(rows, drawn) if isinstance(each, list)]
    elif name.endswith(".yaml"):
        some = drawn.sample([*changed(yaml.load(text, LOADER), drawn)], min(MOST, 500))
        found = [yaml.safe_dump(each, sort_keys=False) for each in some]
    else:
        found = [json.dumps(each) for each in changed(json.loads(text), drawn)] if text.startswith("{") else []
    found = drawn.sample(found, min(MOST, len(found))) + [text[: len(text) * share // 7] for share in (2, 6)]
    return [*BYTES, *(each.encode(errors="surrogateescape") for each in found)]


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_end_in_a_value_or_in_one_sentence(name: str, sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep)
    path, read = sweep / name, READERS[name][1]
    before, num_refused, told = path.read_bytes(), 0, set[str]()
    try:
        quietly(lambda: read(sweep))  # as it was written
        for content in texts_of(name, before.decode()):
            path.write_bytes(content)
            try:
                quietly(lambda: read(sweep))
            except (ConfigError, CheckpointError) as error:
                num_refused += 1
                told.add(str(error))
    finally:
        path.write_bytes(before)
    assert not (sweep / "ran").exists()
    assert all("\n" not in each and each == printable(each) and len(each) < 3000 for each in told)
    assert num_refused or name in READ_PAST


@pytest.mark.parametrize("text", ["x\n/home/me is whole", "\ud800\u202e"])
def test_no_word_of_a_file_passes_for_a_message_or_cannot_be_written(text: str, sweep: Path) -> None:
    for name in ("a/checkpoints/step-00000001/manifest.json", "a/job.json"):
        path, read = sweep / name, READERS[name][1]
        before = path.read_text()
        found = {**json.loads(before), "overrides": [text], "meta": {"averages": text}}
        path.write_text(json.dumps({**found, "sha256": digest(found)}))
        try:
            quietly(lambda read=read: read(sweep))
        except CheckpointError as error:
            assert "\n" not in str(error) and str(error).encode()
        finally:
            path.write_text(before)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_ordinary_file_is_not_opened_and_an_endless_one_is_not_read(name: str, sweep: Path) -> None:
    path, read, secret = sweep / name, READERS[name][1], sweep / "secret"
    secret.write_text("PRIVATE")
    before = path.read_bytes()

    def sparse() -> None:
        path.touch()
        os.truncate(path, 1 << 42)

    plants: tuple[Callable[[], object], ...]
    plants = lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to(secret), sparse
    try:
        for plant in plants:
            path.unlink()
            plant()
            try:
                quietly(lambda: read(sweep))
            except (ConfigError, CheckpointError) as error:
                assert "PRIVATE" not in str(error)
    finally:
        path.unlink()
        path.write_bytes(before)
