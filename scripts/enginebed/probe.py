"""Notes what a rank of `train` has seen, in a file of its own, and kills it or signals it once if it is told to.

`engines.py` puts this beside the programs of docs/engines.md, and `@probe.watched(…)` above their `train`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def watched(folder: str, hurt_at: int | None, by: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that leaves rank, world size, process, weights and samples in `folder` once `train` returns.

    Args:
        hurt_at: step at which the run is hurt, unless it was before. None: never.
        by: "SIGKILL", which rank 1 gets, or another signal, which every rank gets.
    """

    def around(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def run(*args: Any, **kwargs: Any) -> Any:
            found: dict[str, Any] = {"samples": [], "pid": os.getpid()}
            model = None

            def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
                nonlocal model
                if type(module).__name__ != "Net" or not module.training:
                    return
                model = module
                found["rank"], found["world_size"] = torch.distributed.get_rank(), torch.distributed.get_world_size()
                found["samples"] += inputs[0].tolist()
                found["steps"] = found.get("steps", 0) + 1
                done = Path(folder, f"hurt-{found['rank']}")
                if found["steps"] == hurt_at and (by != "SIGKILL" or found["rank"] == 1) and not done.exists():
                    done.touch()
                    os.kill(os.getpid(), signal.Signals[by])

            hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
            try:
                result = train(*args, **kwargs)
            finally:
                hook.remove()
            if model is not None:
                weights = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
                found["weights"] = hashlib.sha256(weights).hexdigest()
                Path(folder, f"{uuid.uuid4().hex}.json").write_text(json.dumps(found))
            return result

        return run

    return around
