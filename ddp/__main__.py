"""The command line: `python -m ddp COMMAND …`; `ddp/commands/registry.py` lists the commands."""

import sys

from ddp.commands.registry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
