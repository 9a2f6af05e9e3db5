"""Lists the commands, and runs one: its function is imported by name when the command is called.

`torchrun … -m ddp train` trains as well, in the processes that torchrun has started; so do `mpirun` and `srun`
(`comm/meeting/place.py`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ddp.collectives.schedule import ScheduleError
from ddp.errors import WorkersFailed, did_you_mean
from ddp.process.arguments import Parser, program
from ddp.process.terminal import ended_by_ctrl_c, say
from ddp.units import parse_delay, parse_rate

COMMANDS = {
    "train": ("commands.train.main", "trains a model on this host's workers; its --help lists all settings"),
    "draw": ("commands.schedules.draw_main", "draws a schedule's rounds, or a pipeline's"),
    "draw step": ("lab.timeline.main", "draws where the time of a step of a run went, on each rank"),
    "draw overlap": ("lab.draw_overlap.main", "draws how much of the reductions backward hides on this machine"),
    "scale": ("lab.scaling.scale.main", "measures, within seconds, the speed-up of your run with more workers"),
    "search": ("commands.search.main", "searches for settings by Optuna, a run for each trial"),
    "check": ("commands.schedules.check_main", "proves a schedule, and shows what each chunk becomes"),
    "simulate": ("commands.schedules.simulate_main", "predicts time and messages of a schedule on another network"),
    "explain": ("lab.explain.main", 'measures here, and says which all-reduce "auto" chooses and why'),
    "forecast": ("lab.forecast.question.main", "predicts a profiled run's step on other workers, hosts and links"),
    "doctor": ("lab.doctor.main", "examines hosts, links and settings, and says what is wrong and how to fix it"),
    "same_bits": ("commands.same_bits.main", "names the first step and tensor in which two runs differ"),
    "where": ("commands.where.main", "says which samples a step has, or which rank reads a sample"),
    "evaluate": ("commands.finished.evaluate_main", "measures a finished run, or a running one with strategy.region"),
    "sidecar": ("commands.sidecar.main", "follows a running job, and evaluates each of its checkpoints"),
    "report": ("lab.scaling.report.main", "reports the speed-up of each number of workers in a sweep"),
    "predict": ("commands.finished.predict_main", "writes a finished run's output for each sample"),
    "exercise": ("lab.clone.exercise", "checks your solution of an exercise of recipes/tutorial"),
    "tutorial": ("lab.clone.tutorial", "writes the read-along, prose next to code, as pages for a browser"),
    "chaos": ("lab.chaos.main", "injects faults into a training run and into its peers', and says what they cost"),
    "bench step": ("lab.bench.step.main", "times training steps, and counts their memory, next to torch's classes"),
    "bench forecast": ("lab.clone.bench_forecast", "compares forecasts of training steps with the steps"),
    "bench collectives": ("lab.bench.collectives.main", "times collectives next to torch.distributed's on Gloo"),
}
"""The name of a command, of one word or two → a function, which takes the other words and returns the exit status; what
it does. `ddp/lab/` is named here, and imported nowhere else outside of it."""
EXAMPLES = """\
examples:
  python -m ddp train data=cifar10 model=resnet18 cluster.workers=4
  python -m ddp search model.width=16,32 'optim.lr=interval(1e-3,1e-2)' --trials 20
  python -m ddp scale model=gpt data=standard_library                  your run on 1, 2, 4 … workers, in seconds
  python -m ddp draw ring 4                                            as text; with --svg ring.svg as a picture
  python -m ddp draw 1f1b 4 --micro 8                                  a pipeline of 4 stages, and its bubble
  python -m ddp draw overlap --workers 2                               the timeline of a step; with --svg, too
  python -m ddp draw step runs/mine                                    a step of a run that had profile.steps=5
  python -m ddp check hierarchical 6 --hosts 3,3                       ranks 0 to 2 on one host, 3 to 5 on another
  python -m ddp check my_module:chain 4                                a schedule of your own
  python -m ddp simulate butterfly 1024 --per-host 8 --bytes 25MB --rate 10gbit
  python -m ddp explain 25MB --workers 2
  python -m ddp forecast runs/mine --ranks 64 --per-host 8 --rate 10gbit --alpha 50us
  python -m ddp doctor                                                 are these hosts ready for training?
  python -m ddp same_bits runs/one runs/three                          of runs that had same_bits.hash_every=10
  python -m ddp where runs/mine --step 47                              the samples of a step, rank by rank
  python -m ddp where runs/mine --sample 123 --epoch 7                 its step, rank and shard
  python -m ddp evaluate runs/mine data.test_path=other.csv            the metrics of a finished run, on other data
  python -m ddp evaluate region=mine                                   of a run with strategy.region=mine, now
  python -m ddp sidecar runs/mine                                      evaluates each checkpoint as it is saved
  python -m ddp report runs/sweep                                      report.html, and report.md with pictures
  python -m ddp predict runs/mine --out scores.csv                     its model's output for each sample
  python -m ddp exercise 02                                            checks your solution in 02_ring.py
  python -m ddp tutorial --html site/                                  the read-along, as pages for a browser
  python -m ddp chaos --peer torchrun --fault kill --rounds 3          what a lost worker costs
  python -m ddp bench step --models digits-cnn,mine:Net                your own model next to torch's class
  python -m ddp bench step --variants mirrored,sharded,torch --memory  step and memory of each strategy
  python -m ddp bench step --variants same_bits,accumulated            what same_bits=true costs
  python -m ddp bench forecast --workers 2                             how far off a forecast is
  python -m ddp bench collectives --workers 2 --sizes 64KB

python -m ddp COMMAND --help lists the options of a command."""


def main(argv: Sequence[str]) -> int:
    """Runs a command; without one, prints the list. Returns the exit status."""
    for num_words in (2, 1):
        if (name := " ".join(argv[:num_words])) in COMMANDS:
            return _run(COMMANDS[name][0], argv[num_words:])
    parser = Parser(
        prog=program(),
        usage=f"{program()} COMMAND …",
        description="Trains, evaluates, measures, and answers questions about collectives.",
        epilog=EXAMPLES.replace("python -m ddp", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if argv and not argv[0].startswith("-"):
        if several := [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]:
            parser.error(f"{argv[0]} alone is no command; give one of {', '.join(several)}")
        hint = did_you_mean(argv[0], COMMANDS)
        parser.error(f"there is no command {argv[0]}.{hint} The commands are {', '.join(COMMANDS)}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning)
    parser.parse_args(argv)  # refuses other words, or prints the help that was asked for
    parser.print_help()
    return 0


def _run(function: str, words: Sequence[str]) -> int:
    module, _, name = function.rpartition(".")
    with ended_by_ctrl_c():
        command = getattr(import_module(f"ddp.{module}"), name)
    try:
        return int(command(words))
    except KeyboardInterrupt:
        say("stopped by SIGINT", to=sys.stderr)
        return 128 + signal.SIGINT


# --- What every command has: a parser with the name that the user types, and one way to print a result or an error ---


def parser_of(name: str, **options: Any) -> Parser:
    """Returns the parser of a command, described as in the list of commands; other keywords are argparse's."""
    _, about = COMMANDS.get(name, ("", ""))
    described = {"description": f"{about[0].upper()}{about[1:]}."} if about else {}
    return Parser(prog=f"{program()} {name}", **described | options)


def respond(parser: Parser, options: argparse.Namespace, run: Callable[[argparse.Namespace], str]) -> int:
    """Prints a command's result, or its error in one line. Returns the exit status."""
    try:
        if text := run(options):  # one rank of many prints it
            say(text)
    except WorkersFailed as error:  # first, because it is also of the type of its cause
        say(error, to=sys.stderr)
        return 1
    except MemoryError:
        parser.error("the result does not fit into the memory of this host")
    except (ValueError, ScheduleError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("stopped by SIGINT before there was an answer", to=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has left; nothing must be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def rate_of(text: str) -> float:
    """Returns bits per second."""
    rate = parse_rate(text)
    if rate is None:
        raise argparse.ArgumentTypeError(f"{text:.40}: give bits per second, e.g. 10gbit or 100mbit")
    return rate


def time_of(text: str) -> float:
    """Returns seconds."""
    seconds = parse_delay(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text:.40}: give a time, e.g. 20us or 5ms")
    return seconds
