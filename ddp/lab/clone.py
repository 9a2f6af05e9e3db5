"""Finds what lies beside the package, in recipes/ of a clone: the code of some verbs, and of benchmarks' pictures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp.commands.registry import parser_of
from ddp.errors import ConfigError

CLONE = Path(__file__).parents[2]


def exercise(words: Sequence[str]) -> int:
    """Checks the reader's solution of an exercise."""
    return _run("exercise", "recipes.tutorial.tools.exercise", words)


def tutorial(words: Sequence[str]) -> int:
    """Writes the read-along as pages."""
    return _run("tutorial", "recipes.tutorial.tools.web", words)


def bench_forecast(words: Sequence[str]) -> int:
    """Compares forecasts with steps."""
    return _run("bench forecast", "recipes.studies.forecasts", words)


def _run(command: str, module: str, words: Sequence[str]) -> int:
    try:
        return int(of_clone(module, wanted_by=command).main(words))
    except ConfigError as error:
        parser_of(command).error(str(error))


def of_clone(module: str, *, wanted_by: str) -> Any:
    """Imports a module of recipes/.

    Args:
        wanted_by: the command or option that needs it, for the error.

    Raises:
        ConfigError: this package was installed without it.
    """
    if not (CLONE / "recipes" / "tutorial" / "tools").is_dir():
        raise ConfigError(
            f"{wanted_by} needs recipes/, which an installed package does not have: call scripts/ddp in a clone"
        )
    if str(CLONE) not in sys.path:
        sys.path.append(str(CLONE))
    return importlib.import_module(module)
