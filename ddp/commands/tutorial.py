"""The verbs `tutorial` and `exercise`, whose code lies beside the chapters: in recipes/tutorial/tools/ of a clone."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.errors import ConfigError

if TYPE_CHECKING:
    from ddp.process.arguments import Parser

    Questions = argparse._SubParsersAction[Parser]

CLONE = Path(__file__).parents[2]


def tool(name: str) -> Any:
    """Imports a module of recipes/tutorial/tools/.

    Raises:
        ConfigError: this package was installed without it.
    """
    if not (CLONE / "recipes" / "tutorial" / "tools").is_dir():
        raise ConfigError(
            "the chapters and exercises are in recipes/tutorial/ of the repository, and an installed package has "
            "none of them: call scripts/ddp in a clone"
        )
    if str(CLONE) not in sys.path:
        sys.path.append(str(CLONE))
    return importlib.import_module(f"recipes.tutorial.tools.{name}")


def tutorial_question(questions: Questions) -> None:
    """Adds `tutorial`: how does data-parallel training come about, step by step?"""

    def answer(options: argparse.Namespace) -> str:
        return str(tool("web").write_site(options.html))

    parser = questions.add_parser("tutorial", help="writes the read-along, prose beside code, as pages for a browser")
    parser.add_argument("--html", type=Path, required=True, metavar="FOLDER", help="the folder to write them into")
    parser.set_defaults(answer=answer)


def exercise_question(questions: Questions) -> None:
    """Adds `exercise`: is the reader's solution right, and if it is not, what is wrong with it?"""

    def answer(options: argparse.Namespace) -> str:
        return str(tool("exercise").answer(options.number, options.file))

    parser = questions.add_parser("exercise", help="checks your solution of an exercise of recipes/tutorial")
    parser.add_argument("number", help="02, 03, 06, 07 or 08; or schedule, for an all-reduce of your own")
    parser.add_argument("file", nargs="?", help="your file (default: the exercise's, in this folder); or MODULE:NAME")
    parser.set_defaults(answer=answer)
