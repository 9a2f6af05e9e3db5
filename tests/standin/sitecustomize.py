"""A stand-in for ddp.run.assembly.stages, put in place by PYTHONPATH before anything else: launcher tests in seconds.

It trains nothing. What its workers do is told by the variable STANDIN: "train", "wait" (for an agreed stop), or
"raise" (at rank 1). The agreement is a file.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path


def check(config):
    if config.seed == 404:
        from ddp.errors import ConfigError

        raise ConfigError("data.root=data: no such data")
    return None, None


def run(config, run_dir):
    rank = int(os.environ["RANK"])
    print(f"this is rank {rank}", flush=True)
    (run_dir / f"seen-{rank}.json").write_text(json.dumps(_surroundings(config)))
    stopped_by = None
    if os.environ["STANDIN"] == "wait":
        stopped_by = _wait_for_agreed_stop(run_dir)
    if os.environ["STANDIN"] == "raise" and rank == 1:
        error = ArithmeticError("scripted")
        error.ddp_step = 7
        raise error
    if rank == 0:
        summary = {"stopped_by": stopped_by, "world_size": config.cluster.workers, "test_accuracy": 0.5}
        summary["main_metric"] = "test_accuracy"
        (run_dir / "summary.json").write_text(json.dumps(summary))


def finish(config, run_dir):
    print(f"finished {json.loads((run_dir / 'summary.json').read_text())['test_accuracy']}", flush=True)


def _surroundings(config):
    torch = sys.modules.get("torch")
    return {
        "pid": os.getpid(),
        "hydra": any(name.split(".")[0] in ("hydra", "omegaconf") for name in sys.modules),
        "threads": config.cluster.threads_per_worker,
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "torch_threads": torch and torch.get_num_threads(),
        "mkl": os.environ.get("MKL_CBWR"),
        "workers": config.cluster.workers,
    }


def _wait_for_agreed_stop(run_dir: Path) -> str:
    agreed = run_dir / "agreed"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: agreed.write_text(signal.Signals(number).name))
    (run_dir / f"ready-{os.environ['RANK']}").touch()
    while not agreed.exists() or not agreed.read_text():
        time.sleep(0.02)
    return agreed.read_text()


module = types.ModuleType("ddp.run.assembly.stages")
module.check, module.run, module.finish = check, run, finish
sys.modules["ddp.run.assembly.stages"] = module
