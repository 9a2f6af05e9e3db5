"""Times our collectives beside torch.distributed's on Gloo, in the same run.

    python -m ddp bench collectives                                    2 and 4 ranks on this host, 1 KB to 64 MB
    python -m ddp bench collectives --workers 2 --sizes 1MB,25MB --cases ring,shared_memory --plot mine.png
    python -m ddp bench collectives --beside 1                         beside a process that keeps a core busy
    python -m ddp bench collectives --netbed 2x2@1gbit --sizes 25MB    on hosts made for it (root, iproute2)
    python -m ddp bench collectives --netbed 4x1@5ms --sizes 4KB       the same with a delay of 5 ms from host to host
    torchrun … -m ddp bench collectives --sizes 25MB                  on ranks that are there already

Cases: allocated (memory from comm.allocate), ordinary (any tensor), barrier, transport (shared memory off), and each
algorithm by name. ddp/lab/bench/collectives.py says what is measured. Every rank has one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.lab.bench.collectives import CASES, Case, CollectiveCell, TimeCollectives
from ddp.lab.bench.command import add_options, place_of, run
from ddp.lab.bench.place import refuse_unknown, split
from ddp.run.settings.checks import WAYS
from ddp.units import parse_size


def main(words: Sequence[str]) -> int:
    """Times the collectives that the words ask for."""
    parser = parser_of("bench collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2,4", least=2, turns=5, plots=True)
    sizes, cases = "1KB,64KB,1MB,4MB,25MB,64MB", ",".join(CASES)
    parser.add_argument("--sizes", default=sizes, metavar="SIZE,SIZE,…", help="of each tensor (default: %(default)s)")
    parser.add_argument("--cases", default=cases, metavar="CASE,CASE,…", help="what to time (default: %(default)s)")
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Times them; the report is printed."""
    where, names = place_of(options), split("--cases", options.cases)
    refuse_unknown("case", names, (*CASES, *WAYS))
    cases, sizes = tuple(map(Case.named, names)), tuple(map(parse_size, split("--sizes", options.sizes)))
    run(options, [TimeCollectives(cases, sizes, options.turns, where)], CollectiveCell, where)
    return ""
