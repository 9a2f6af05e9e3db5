"""Training, and questions, from the command line.

`EXAMPLES` has one of each. `torchrun … -m ddp train` trains as well, in the processes that torchrun has started; so do
`mpirun` and `srun` (`comm/meeting/place.py`).

Each question is one function below: it adds its subcommand, and defines how to answer it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddp.collectives.catalog import (
    BETWEEN_HOSTS,
    SCHEDULES,
    Hosts,
    Schedule,
    all_reduce_schedules,
    own_all_reduce,
    prove,
)
from ddp.collectives.cost import about_messages, bus_bandwidth
from ddp.collectives.draw import draw
from ddp.collectives.schedule import ScheduleError
from ddp.collectives.simulate import Link, Network, equal_hosts, simulate, whole_chunks
from ddp.commands.tutorial import exercise_question, tutorial_question
from ddp.errors import WorkersFailed, did_you_mean
from ddp.pictures.schedule import svg
from ddp.process.arguments import Parser, checked, positive, whole
from ddp.process.invocation import program
from ddp.run.settings.address import from_address, is_address
from ddp.run.settings.checks import most_workers
from ddp.units import format_bandwidth, format_size, format_time, parse_delay, parse_rate, parse_size

if TYPE_CHECKING:
    Questions = argparse._SubParsersAction["Parser"]

OVERLAP = "draw overlap"  # a question of two words, because it draws a run, not a schedule
MOST_RANKS_SHOWN = 64
MOST_RANKS_PICTURED = 32
RANKS_DRAWN = whole(1, 256, "a drawing has a line for each rank in each round")
RANKS_FOLLOWED = whole(1, 10_000, "some schedules take half a minute with 10,000 ranks")  # proven, or simulated
MOST_EXPLAINED = "128GB"
MOST_PARTS_PROVEN = 2 * 512 * 512  # chunks or messages of all ranks together: a ring of 512 takes some seconds
EXAMPLES = """\
examples:
  python -m ddp train data=cifar10 model=resnet18 cluster.workers=4
  python -m ddp draw ring 4                                            as text; with --svg ring.svg as a picture
  python -m ddp draw overlap --workers 2                               the timeline of a step; with --svg, too
  python -m ddp check hierarchical 6 --hosts 3,3                       ranks 0 to 2 on one host, 3 to 5 on another
  python -m ddp check my_module:chain 4                                a schedule of your own
  python -m ddp simulate butterfly 1024 --per-host 8 --bytes 25MB --rate 10gbit
  python -m ddp explain 25MB --workers 2
  python -m ddp explain 100MB --hooks --transport-only                 what every hook would save
  python -m ddp where runs/mine --step 47                              the samples of a step, rank by rank
  python -m ddp where runs/mine --sample 123 --epoch 7                 its step, rank and loader process
  python -m ddp evaluate runs/mine data.test_path=other.csv            the metrics of a finished run, on other data
  python -m ddp predict runs/mine --out scores.csv                     what its model makes of each sample
  python -m ddp exercise 02                                            checks your solution in 02_ring.py
  python -m ddp tutorial --html site/                                  the read-along, as pages for a browser

python -m ddp QUESTION --help lists the options of a question."""


def main(argv: Sequence[str]) -> int:
    """Trains, or answers one question; returns the exit status."""
    if argv[:1] == ["train"]:
        train(argv[1:])
    parser = Parser(
        prog=program(),
        usage=f"{program()} QUESTION …",
        description="Trains, and answers questions about collectives.",
        epilog=EXAMPLES.replace("python -m ddp", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    questions = parser.add_subparsers(
        title="questions", metavar="QUESTION", required=True, dest="question", prog=parser.prog
    )
    questions.add_parser("train", help="trains a model on this host's workers; its --help lists all settings")
    for add_question in (
        *(draw_question, overlap_question, check_question, simulate_question, explain_question),
        *(where_question, evaluate_question, predict_question, exercise_question, tutorial_question),
    ):
        add_question(questions)
    if argv[:2] == OVERLAP.split():
        argv = [OVERLAP, *argv[2:]]
    options, settings = parser.parse_known_args(argv)
    if wrong := [word for word in settings if "settings" not in options or "=" not in word or word.startswith("-")]:
        questions.choices[options.question].error(f"unrecognized arguments: {' '.join(wrong)}")
    options.settings = settings
    try:
        if text := options.answer(options):  # one rank of many says it
            print(text, flush=True)
    except (ValueError, ScheduleError) as error:
        questions.choices[options.question].error(str(error))
    except WorkersFailed as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("stopped by SIGINT before there was an answer", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has left; nothing must be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def train(settings: Sequence[str]) -> NoReturn:
    """Trains with these settings, which Hydra reads; ends the process."""
    from ddp.comm.meeting.place import is_rank
    from ddp.run.launch import command_line as launcher
    from ddp.run.launch import torchrun as under_torchrun

    sys.argv = [f"{program()} train", *settings]
    with launcher.bad_input_to(launcher.exit_with_error):
        main = under_torchrun.main if is_rank() else launcher.main
    main()


def draw_question(questions: Questions) -> None:
    """Adds `draw`: what happens in which round?"""

    def answer(options: argparse.Namespace) -> str:
        schedule, hosts = chosen_schedule(options)
        if options.svg is None:
            return draw(schedule.algorithm, options.num_ranks)
        if options.num_ranks > MOST_RANKS_PICTURED:
            raise ValueError(
                f"--svg with {options.num_ranks} ranks: take at most {MOST_RANKS_PICTURED}; a picture shows every "
                "chunk of every rank after every round, and a browser opens no larger one"
            )
        title = f"{options.schedule}, {options.num_ranks} ranks"
        write_picture(options.svg, svg(schedule, options.num_ranks, title=title, hosts=hosts))
        return f"{options.svg}: {title}"

    parser = questions.add_parser(
        "draw",
        help='draws the rounds of a schedule, or, as "draw overlap", the timeline of a step',
        epilog=f"{program()} {OVERLAP} --help: the timeline of a step.",
    )
    add_schedule(parser, RANKS_DRAWN)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")
    parser.set_defaults(answer=answer)


def overlap_question(questions: Questions) -> None:
    """Adds `draw overlap`: how much of the reductions does backward hide on this machine?"""

    def answer(options: argparse.Namespace) -> str:
        from ddp.pictures.timeline import timeline_svg, timeline_text
        from ddp.run.launch.command_line import launch

        if options.svg is not None and not options.svg.absolute().parent.is_dir():
            raise ValueError(f"cannot write {options.svg}: there is no such folder; name another file after --svg")
        measured = launch(overlap_here, options.bucket_mb, workers=options.workers, threads_per_worker=1, timeout_s=300)
        background, foreground, default = measured[0]
        if options.svg is not None:
            write_picture(options.svg, timeline_svg(background, foreground))
            return f"{options.svg}: a step of {options.workers} workers"
        text = timeline_text(background, foreground)
        return f"{text}\n\nBackward and reductions in ms. Here ddp reduces {default} unless it is told otherwise."

    parser = questions.add_parser(OVERLAP, description="Trains a small network, and draws the timeline of a step.")
    add_workers(parser)
    parser.add_argument(
        "--bucket-mb", type=positive, default=4.0, metavar="MB", help="size of a bucket, in MiB (default: %(default)s)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")
    parser.set_defaults(answer=answer)


def overlap_here(bucket_mb: float) -> tuple[object, ...]:
    """Returns, as one rank of a new world, the timelines of a step."""
    import ddp
    from ddp.bench.overlap import overlap

    measured = overlap(ddp.init(device="cpu"), bucket_mb=bucket_mb)
    ddp.shutdown()
    return measured


def write_picture(path: Path, picture: str) -> None:
    """Writes a picture to the file that was named."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file after --svg") from error


def check_question(questions: Questions) -> None:
    """Adds `check`: is a schedule right, and in which order does it add the contributions?"""

    def answer(options: argparse.Namespace) -> str:
        schedule, _ = chosen_schedule(options)
        if (parts := num_parts(schedule, options.num_ranks)) > MOST_PARTS_PROVEN:
            raise ValueError(
                f"{options.schedule} with {options.num_ranks:,} ranks: its proof follows {parts:,} chunks or messages "
                f"of all ranks; take so few ranks that there are at most {MOST_PARTS_PROVEN:,}, in a ring 512"
            )
        proof = schedule.check(options.num_ranks)
        lines = [
            f"{options.schedule} with {options.num_ranks} ranks: proven ({schedule.goal.value})",
            f"  rounds: {proof.num_rounds}; a rank sends at most {max(proof.messages_sent)} messages, "
            f"{float(proof.busiest):.4g} times the buffer",
        ]
        if schedule.goal.adds:
            lines.append(f"  order of additions: {'canonical' if proof.canonical else 'not canonical'}")
        if options.num_ranks > MOST_RANKS_SHOWN:
            return "\n".join([*lines, f"  (what chunks become is shown up to {MOST_RANKS_SHOWN} ranks)"])
        of = "" if schedule.goal.adds else "of rank "
        return "\n".join(lines + [f"  chunk {chunk} = {of}{part}" for chunk, part in enumerate(proof.expressions)])

    parser = questions.add_parser("check", help="proves a schedule, and shows what each chunk becomes")
    add_schedule(parser, RANKS_FOLLOWED)
    parser.set_defaults(answer=answer)


def simulate_question(questions: Questions) -> None:
    """Adds `simulate`: how long would a schedule take on such a network?"""

    def answer(options: argparse.Namespace) -> str:
        per_host = 1 if options.per_host is None else options.per_host
        if options.per_host is not None and options.hosts:
            raise ValueError("--hosts and --per-host both say who shares a host: leave one out")
        schedule, hosts = chosen_schedule(options, per_host=per_host)
        network = Network(
            hosts=hosts,
            inside=Link(options.inside_alpha, 8 / options.inside_rate),
            between=Link(options.alpha, 8 / options.rate),
            gamma_s=1 / (options.add_gb_s * 1e9),
        )
        numel = whole_chunks(options.bytes // 4, schedule.num_chunks(options.num_ranks))  # for symmetry
        timeline = simulate(schedule, network, numel)
        sent, left = max(timeline.bytes_sent), max(timeline.host_bytes_sent)
        busbw = bus_bandwidth(schedule.goal, options.num_ranks, options.bytes, timeline.makespan_s)
        return (
            f"{options.schedule}, {options.num_ranks:,} ranks on {len(hosts):,} hosts, {format_size(options.bytes)}: "
            f"{format_time(timeline.makespan_s)}\n"
            f"  {timeline.num_rounds:,} rounds, {timeline.num_messages:,} messages\n"
            f"  sent by the busiest rank {sent:,} bytes ({sent / options.bytes:.3g} times the buffer), "
            f"by the busiest host {left:,}\n"
            f"  bus bandwidth {format_bandwidth(busbw)} GB/s"
        )

    parser = questions.add_parser("simulate", help="predicts time, messages and bytes of a schedule on another network")
    add_schedule(parser, RANKS_FOLLOWED)
    parser.add_argument("--per-host", type=whole(1), metavar="N", help="ranks on each host (default: 1)")
    for option, read, usual, meaning in (
        ("--bytes", checked(parse_size), "25MB", "size of the buffer"),
        ("--alpha", time_of, "20us", "latency between hosts"),
        ("--rate", rate_of, "10gbit", "bandwidth between hosts, in bits/s"),
        ("--inside-alpha", time_of, "2us", "latency inside a host"),
        ("--inside-rate", rate_of, "100gbit", "bandwidth inside a host"),
        ("--add-gb-s", positive, "10", "additions per rank, GB/s"),
    ):
        parser.add_argument(option, type=read, default=usual, help=f"{meaning} (default: %(default)s)")
    parser.set_defaults(answer=answer)


def explain_question(questions: Questions) -> None:
    """Adds `explain`: which way would "auto" choose for an all-reduce of that size on this machine?"""

    def answer(options: argparse.Namespace) -> str:
        from ddp.comm.meeting.place import is_rank
        from ddp.process.memory import available_bytes
        from ddp.run.launch.command_line import launch

        if options.compute is not None and not options.hooks:
            raise ValueError("--compute goes with --hooks, which says what they make of a step")
        if not options.hooks and 2 * options.bytes * options.workers > available_bytes():
            raise ValueError(
                f"{format_size(options.bytes)}: all-reduces of it are timed, and {options.workers} ranks have no "
                "memory for that here; give a smaller size"
            )
        question = partial(
            explained,
            options.bytes,
            shared_memory=not options.transport_only,
            compute_s=(options.compute or 0.0) if options.hooks else None,
        )
        if is_rank():
            return question()
        answers = launch(question, workers=options.workers, threads_per_worker=1, timeout_s=120)
        return str(answers[0])

    parser = questions.add_parser(
        "explain",
        help='measures here, and says which all-reduce "auto" chooses and why; or what each hook would save',
        epilog="Between several hosts: torchrun --nnodes … -m ddp explain … on each of them.",
    )
    parser.add_argument(
        "bytes", type=size_explained, help="size of the tensor, or with --hooks of a model's gradients, e.g. 25MB"
    )
    add_workers(parser)
    parser.add_argument("--transport-only", action="store_true", help="as if they could not share memory")
    parser.add_argument("--hooks", action="store_true", help="what every wire format and hook would make of a step")
    parser.add_argument("--compute", type=time_of, metavar="TIME", help="of its forward and backward, e.g. 250ms")
    parser.set_defaults(answer=answer)


def where_question(questions: Questions) -> None:
    """Adds `where`: which samples were in a step of a run, or when and by whom was a sample read?"""

    def answer(options: argparse.Namespace) -> str:
        from ddp.commands.where import where

        return where(options.run, step=options.step, sample=options.sample, epoch=options.epoch)

    parser = questions.add_parser("where", help="says which samples a step has, or who reads a sample")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=whole(1), help="number of a step, from 1")
    parser.add_argument("--sample", type=whole(0), help="number of a training sample, from 0")
    parser.add_argument("--epoch", type=whole(0), help="the epoch in which to look for it, from 0")
    parser.set_defaults(answer=answer)


def evaluate_question(questions: Questions) -> None:
    """Adds `evaluate`: how good is a finished run, on its held-out samples or on others?"""

    def answer(options: argparse.Namespace) -> str:
        from ddp.commands.finished import evaluate_run

        return evaluate_run(options.run, options.settings)

    add_run(questions, "evaluate", "says how good a finished run is", answer)


def predict_question(questions: Questions) -> None:
    """Adds `predict`: what does a finished run say of each sample?"""

    def answer(options: argparse.Namespace) -> str:
        from ddp.commands.finished import predict_run

        return predict_run(options.run, options.settings, options.out)

    parser = add_run(questions, "predict", "writes what a finished run makes of each sample", answer)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="NAME.csv or NAME.npy, a row a sample")


def add_run(questions: Questions, name: str, meaning: str, answer: Callable[[argparse.Namespace], str]) -> Parser:
    """Adds a question about a finished run, to which settings may be given."""
    parser = questions.add_parser(
        name,
        help=meaning,
        usage=f"{program()} {name} RUN {'--out FILE ' if name == 'predict' else ''}[KEY=VALUE …]",
        epilog="KEY=VALUE: data.test_path=other.csv, cluster.workers=4, loader.…, comm.…, device=…, trust=true",
    )
    parser.add_argument("run", type=Path, help="the folder of a run, whose best checkpoint is taken, or a checkpoint")
    parser.set_defaults(answer=answer, settings=[])
    return parser


def explained(nbytes: int, *, shared_memory: bool, compute_s: float | None) -> str:
    """Returns, as rank 0 of a new world, what its communicator says about an all-reduce of `nbytes`; elsewhere "".

    Args:
        compute_s: of a step; None: nothing is asked about hooks.
    """
    import ddp
    from ddp.bench.offers import compared

    comm = ddp.init(device="auto", shared_memory=shared_memory)
    answer = comm.explain(nbytes) if compute_s is None else compared(comm, nbytes, compute_s=compute_s)
    rank = comm.rank
    ddp.shutdown()
    return answer if rank == 0 else ""


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds the number of ranks that a question starts."""
    parser.add_argument(
        "--workers",
        type=whole(2, most_workers(), "one worker alone has nothing to reduce, and many take turns on the cores"),
        default=2,
        help="ranks to start on this host (default: %(default)s)",
    )


def add_schedule(parser: argparse.ArgumentParser, num_ranks: Callable[[str], int]) -> None:
    """Adds the arguments that name a schedule; `num_ranks` is the type of the number of ranks."""
    names = [*SCHEDULES, "two_dimensional", *BETWEEN_HOSTS]
    parser.add_argument("schedule", help=f"one of {', '.join(names)}; or MODULE:NAME, a generator of your own")
    parser.add_argument("num_ranks", type=num_ranks, help="from 1 up")
    parser.add_argument(
        "--hosts", metavar="N,N,…", help="how many ranks each host has, e.g. 2,2 (one host unless given)"
    )


def chosen_schedule(options: argparse.Namespace, *, per_host: int | None = None) -> tuple[Schedule, Hosts]:
    """Returns the schedule that was asked for, and the hosts that its ranks stand on.

    Args:
        per_host: ranks on each host unless --hosts says it; None: all ranks on one host.
    """
    name, num_ranks = options.schedule, options.num_ranks
    hosts = hosts_of_sizes(options.hosts, num_ranks) if options.hosts else equal_hosts(num_ranks, per_host or num_ranks)
    if is_address(name):
        schedule = own_all_reduce(from_address(name, key="schedule", folder=Path.cwd()))
        if num_parts(schedule, num_ranks) <= MOST_PARTS_PROVEN:
            prove(schedule, num_ranks, what=name)
        return schedule, hosts
    found = {**SCHEDULES, **all_reduce_schedules(hosts)}
    if name in found:
        return found[name], hosts
    if name in BETWEEN_HOSTS:
        raise ValueError(
            f"{name} needs several hosts, one of them with several ranks: add e.g. --hosts 2,2 for 4 ranks"
        )
    if name == "two_dimensional":
        raise ValueError(f"{num_ranks} ranks fill no grid of several rows and columns: take another number, or ring")
    names = [*SCHEDULES, "two_dimensional", *BETWEEN_HOSTS]
    raise ValueError(f"there is no schedule {name!r}.{did_you_mean(name, names)} There are {', '.join(names)}")


def num_parts(schedule: Schedule, num_ranks: int) -> int:
    """Returns the number of chunks on all ranks together, or of messages, whichever is larger."""
    return max(num_ranks * schedule.num_chunks(num_ranks), about_messages(schedule, num_ranks))


def hosts_of_sizes(sizes: str, num_ranks: int) -> Hosts:
    """Returns the ranks of each host: "2,3" → ranks 0 and 1 on one host, 2 to 4 on another."""
    numbers = sizes.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--hosts {sizes}: give the number of ranks of each host, from 1 up, e.g. --hosts 2,2")
    starts = [0, *accumulate(int(number) for number in numbers)]
    if starts[-1] != num_ranks:
        raise ValueError(f"--hosts {sizes} are {starts[-1]} ranks, but num_ranks={num_ranks}: make them equal")
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))


def size_explained(text: str) -> int:
    """Returns the bytes of a tensor that `explain` is asked about."""
    nbytes = checked(parse_size)(text)
    if nbytes > parse_size(MOST_EXPLAINED):
        raise argparse.ArgumentTypeError(f"{text:.40}: give up to {MOST_EXPLAINED}, for which predictions take seconds")
    return nbytes


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
