"""Writes the read-along, prose next to code, as pages for a browser.

The code of `tutorial` and `exercise` lies with the chapters, in recipes/tutorial/tools/ of a clone.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError

CLONE = Path(__file__).parents[2]


def main(words: Sequence[str]) -> int:
    """Writes the pages where the words say."""
    parser = parser_of("tutorial")
    parser.add_argument("--html", type=Path, required=True, metavar="FOLDER", help="the folder to write them into")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the files that were written, as text."""
    return str(tool("web").write_site(options.html))


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
