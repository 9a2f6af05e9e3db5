"""From a command line to running workers: compose, check, start, wait, explain.

    recipes/train.py, ddp train           the same, in a rank                    a script or notebook
         │ main                                │ torchrun.main                        │ from_python.launch
         ▼                                     ▼                                      │
    Hydra composes, once             rank 0: Hydra composes, once                     │
    run_folder.prepare: validate, run directory, data, config.yaml                    │
         │ train                               │ store: rank 0 ──config──▶ all        │
         ▼                                     ▼                                      ▼
    processes.py ── worker           worker.train in this process                     processes.py ── worker --call

A worker that fails takes its neighbours with it, unless there are servers. So the parent reads the reports of all
workers and prints the root cause last.

| how a run ends                         | status | where it is decided                    |
|----------------------------------------|--------|----------------------------------------|
| trained                                | 0      |                                        |
| a worker failed or was killed          | 1      | `describe_failures`                    |
| bad input                              | 2      | `run_folder.prepare`, `translated`     |
| it did not learn, or became slow, and  | 3      | `ddp/train/supervision.py`; the workers    |
| watch.action=stop                      |        | agree, save and exit with 0            |
| fewer than min_workers were left, and  | 4      | `ddp/train/survive.py`                     |
| none has come within wait_s            |        |                                            |
| Ctrl-C, or SIGINT to any worker        | 130    | the workers agree, save and exit with  |
| SIGTERM, to the parent or any worker   | 143    | 0; the parent ends with this status    |
| a closed terminal; SIGUSR1; SIGUSR2    | 129; … | the same: 128 + the signal's number    |

This module imports Hydra and OmegaConf inside functions, as only `plugin.py` does besides, so that importing it
stays light and workers stay free of them. A sweep's job is such a command line in its own process: `sweep.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from yaml import YAMLError

from ddp.comm.meeting.cluster_spec import allow_servers, take_cluster
from ddp.comm.meeting.membership import Hosts
from ddp.comm.meeting.place import is_on_loopback
from ddp.comm.meeting.role import ROLE, SERVERS, WORKERS, Job, RoleSettings, role_from_env, store_address
from ddp.errors import USER_ERRORS, ConfigError, TooFewWorkers, first_line, with_causes
from ddp.process.arguments import program, quoted, relative_path, setting_for, train_command
from ddp.process.files import at_home
from ddp.process.memory import leave_out, skip_at_exit
from ddp.process.terminal import console, ended_by_ctrl_c, keep_writing, say
from ddp.run.launch import sweep
from ddp.run.launch.failures import Report, Seat, describe_failures
from ddp.run.launch.processes import run_workers
from ddp.run.launch.run_folder import continued, forget_trial, only_writer, prepare, settings_text, unwritable
from ddp.run.launch.supervisor import with_sidecar
from ddp.run.settings.checks import check_gpus, check_strategy, elastic_of, name_problems
from ddp.run.settings.config import CHOICES, Config, page, plain_defaults
from ddp.run.settings.reader import (
    chosen_in,
    from_plain,
    key_of_option,
    not_among,
    text_settings,
    unknown_choice,
    unknown_key,
)
from ddp.train.reports.results import read_summary
from ddp.units import counted

CONF = Path(__file__).parents[1] / "settings" / "conf"

# ---------------------------------------------------------------------------------------------- from a command line


def main() -> NoReturn:
    """Trains as the command line says: one run, or with `-m` a sweep, a process for each run. Ends the process."""
    keep_writing()
    if {"-h", "--help"} & set(sys.argv[1:]):
        say(page(program()))
        sys.exit(0)
    skip_at_exit()
    with ended_by_ctrl_c():
        import hydra
        from omegaconf import OmegaConf

        _offer_settings()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises exceptions instead of printing them
    with bad_input_to(exit_with_error):
        arguments = options_first(sys.argv[1:])
        sys.argv[1:] = for_hydra(arguments, sweeps=arguments[:1] in (["-m"], ["--multirun"]))
        task = HydraMain(varied_keys(sys.argv[1:]), _options(sys.argv[1:]))
    OmegaConf.register_new_resolver("job_folder", task.job_folder, replace=True)
    try:
        with bad_input_to(exit_with_error):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(task)()
    except OSError as error:
        if task.has_begun:
            raise
        exit_with_error(str(unwritable(error.filename, error)))  # before that, only folders are made
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)  # after --cfg, say: a run and a sweep have ended the process


@dataclass
class HydraMain:
    """Makes one run when Hydra calls it, in this process or in one that a launcher of Hydra's has started.

    Attributes:
        varied: keys to which the command line gives several values.
        options: Hydra's own, such as --config-dir, for the command line of a job.
    """

    varied: Sequence[str]
    options: Sequence[str]
    has_begun: bool = False

    def __call__(self, composed: Any) -> float:
        """Makes one run, and ends the process; or a job of a sweep, in its own process, and returns its objective.

        Hydra has made the run's folder and set its interpolations.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        settings = HydraConfig.get()
        run_dir, overrides = Path(settings.runtime.output_dir), list(settings.overrides.task)
        if settings.mode is RunMode.RUN:
            with bad_input_to(exit_with_error), only_writer(run_dir):
                config = continued(_checked(composed, overrides), overrides, run_dir)
                self.has_begun = True
                sys.exit(_trained(config, run_dir))
        from ddp.run.launch.plugin import objective, of_sweep

        if composed.sweep.parallel > 1:
            raise ConfigError(
                f"sweep.parallel={composed.sweep.parallel}: is for hydra/launcher=jobs; another launcher has settings "
                "of its own"
            )
        ended: list[sweep.Job] = []
        todo = iter([of_sweep(overrides, run_dir)])
        stopped = sweep.run(todo, options=self.options, ended=ended.append)
        if stopped is not None:
            sys.exit(stopped)
        return objective(ended[0], settings.sweeper)

    def job_folder(self, overrides: Sequence[str], number: int, *, _root_: Any) -> str:
        """Names a job's folder; `hydra.sweep.subdir` in ddp/run/settings/conf/train.yaml asks for it."""
        varied = [*self.varied, *(_root_.hydra.sweeper.get("params") or ())]
        return sweep.job_folder(overrides, varied, number=number)


def _trained(config: Config, run_dir: Path) -> int:
    """Prepares and makes a run; returns its status."""
    for key in ("spec", "task", "role"):
        if getattr(config.cluster, key):
            raise ConfigError(f"cluster.{key}: every process needs it on its command line, and not in a file")
    check_gpus(config)
    check_strategy(config)
    say(f"starting {counted(config.cluster.workers, 'worker')} for {relative_path(run_dir)}/ …")
    with ended_by_ctrl_c():
        with leave_out():
            importlib.import_module("ddp.run.assembly.stages")  # torch, which takes a second
        hosts = None if elastic_of(config) is None else _open_to_hosts(config)  # before there is a run in the folder
        prepare(config, run_dir)  # which imports parts of the user's own
    return train(config, run_dir, hosts)


def composed(overrides: Sequence[str]) -> tuple[Config, Path]:
    """Composes one run as `hydra.main` does, without taking over the process. Returns config and run directory."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    _offer_settings()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3", job_name="train"):
        tree = compose("train", overrides=for_hydra(overrides), return_hydra_config=True)
        run_dir = Path(str(OmegaConf.select(tree, "hydra.run.dir"))).absolute()
        with open_dict(tree):
            del tree["hydra"]
        return continued(_checked(tree, overrides), overrides, run_dir), run_dir


@cache
def _offer_settings() -> None:
    """Gives Hydra the defaults of settings/config.py, the choices of groups, addresses, and `${per_worker:…}`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from ddp.run.launch.plugin import register

    def per_worker(*numbers: Any, _root_: Any) -> Any:
        """Makes `batch.global_size='${per_worker:32}'` grow with the workers; leaves what is not a number."""
        is_number = len(numbers) == 1 and isinstance(numbers[0], int)
        return numbers[0] * _root_.cluster.workers if is_number else ",".join(map(str, numbers))

    def named(key: str, name: object) -> str:
        """Returns a name, before Hydra makes a folder of it."""
        for problem in name_problems(key, str(name)):
            raise ConfigError(problem)
        return str(name)

    OmegaConf.register_new_resolver("per_worker", per_worker, replace=True)
    OmegaConf.register_new_resolver("run_folder", partial(named, "run.name"), replace=True)
    OmegaConf.register_new_resolver(
        "sweep_folder", lambda name, date: f"sweep-{date}" if name is None else named("sweep.name", name), replace=True
    )
    store = ConfigStore.instance()
    store.store("settings", plain_defaults())
    for group, choices in CHOICES.items():
        for name, settings in choices.items():
            store.store(name, asdict(settings), group=group)
    register()


def for_hydra(arguments: Sequence[str], *, sweeps: bool = False) -> list[str]:
    """Returns a command line as Hydra reads it. `sweeps`: commas stand between values, a job each."""
    return _quoted_texts(_free_keys(arguments), sweeps=sweeps)


def _free_keys(overrides: Sequence[str]) -> list[str]:
    """Marks the keys of mappings whose keys are the user's as new to Hydra; refuses to remove any other.

    Raises:
        ConfigError: Hydra would remove a setting, which has its default then; or a setting has no name.
    """
    free = ("init_from.rename", "model.args", "data.args", "optim.args", "cluster.spec")
    for override in overrides:
        key = override.lstrip("~").partition("=")[0]
        if override.startswith(("~", "=")) and not key.startswith((*free, "hydra")):
            raise ConfigError(f"{override}: a setting always has a value; write {key or 'NAME'}=VALUE")
    return [f"++{override}" if override.startswith(free) else override for override in overrides]


def join_cluster(arguments: Sequence[str]) -> None:
    """Makes this process the task of the cluster that the command line describes, if it describes one.

    Every task reads this before they meet; the other settings are composed by rank 0 alone.

    Raises:
        ConfigError: the description cannot be right; see `comm/meeting/cluster_spec.py`.
    """
    allow_servers()  # rank 0 refuses them, if the run's strategy has none
    words = [each.lstrip("+") for each in arguments if each.lstrip("+").startswith(("cluster.spec", "cluster.task"))]
    if not words:
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser

    spec: dict[str, Any] = {}
    task = None
    for override in OverridesParser.create().parse_overrides(words):
        key, value = override.key_or_group, cast(Any, override.value())
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: addresses stand in brackets: {key}='[HOST:PORT,HOST:PORT]'")
        if key == "cluster.spec" and value and not isinstance(value, Mapping):
            raise ConfigError(f"{override.input_line}: must be a mapping, as cluster.spec.worker='[HOST:PORT,…]'")
        if key == "cluster.spec":
            spec.update(value or {})
        elif key.startswith("cluster.spec."):
            spec[key.removeprefix("cluster.spec.")] = value
        elif key == "cluster.task":
            task = None if value is None else str(value)
    if spec or task is not None:
        take_cluster(spec, task)


def take_role(arguments: Sequence[str]) -> RoleSettings | None:
    """Puts what the command line says of this process's role into the variables for it; returns what these tell then.

    None: this process is not started by hand as a server or worker.

    Raises:
        ConfigError: it cannot be.
    """
    words = [each.lstrip("+") for each in arguments]
    asked = dict(word.split("=", 1) for word in words if word.startswith("cluster.") and "=" in word)
    if (role := asked.get("cluster.role", "null")) != "null":
        if role not in get_args(Job):
            raise ConfigError(f"cluster.role={role}: must be {' or '.join(get_args(Job))}")
        if role != os.environ.setdefault(ROLE, role):
            raise ConfigError(f"cluster.role={role}: but {ROLE} is {os.environ[ROLE]}: leave one out")
    if (me := role_from_env()) is None or me.job is None:
        return None
    if strange := [word for word in words if word.startswith(("cluster.spec", "cluster.task"))]:
        raise ConfigError(f"{strange[0]}: this process is a {me.job} by its role; leave one of the two out")
    for name, key in ((SERVERS, "cluster.servers"), (WORKERS, "cluster.workers")):
        if key in asked:
            os.environ[name] = asked[key]
    return role_from_env()


def is_of_task(argument: str) -> bool:
    """Returns True for a setting that says which process of several this one is, and so is not the run's."""
    return argument.lstrip("+").startswith(("cluster.task=", "cluster.role="))


def typed() -> list[str]:
    """Returns the settings on this process's command line, but for what is its own, and what describes the cluster."""
    apart = ("cluster.spec", "trust=")
    return [each for each in sys.argv[1:] if not (is_of_task(each) or each.lstrip("+").startswith(apart))]


HYDRAS = {"-m", "--multirun", "-c", "--cfg", "-p", "--package", "--resolve", "-i", "--info"}
HYDRAS |= {"-cd", "--config-dir", "-cn", "--config-name", "--hydra-help", "--version"}


NEAR = 0.8  # of the letters of an option are right: --wrokers is --workers, and --seed is not --seconds


def options_first(arguments: Sequence[str], *, own: Sequence[str] = ()) -> list[str]:
    """Returns the arguments with `-m` in front, because Hydra reads no settings on both sides of it.

    Args:
        own: options of the command, which it has taken out already, unless they were misspelt.

    Raises:
        ConfigError: a setting is written as an option, which Hydra would answer with its usage.
    """
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.startswith("-") and name not in HYDRAS:
            if near := get_close_matches(name, own, 1, NEAR):
                raise ConfigError(f"{name}: there is no such option; did you mean {near[0]}?")
            following = [each for each in arguments[number + 1 :][:1] if "=" not in each and not each.startswith("-")]
            example = f"{key_of_option(name)}={value or (following or ['VALUE'])[0]}"
            raise ConfigError(
                f"{' '.join([argument, *following])}: settings have no dashes before them; write {example}"
            )
    return sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))


PATHS = ("data.path", "data.test_path", "data.validation_path")
FUNCTION = re.compile(r"[a-z_]+\(.*\)")
VALUE = re.compile(r"""(?:[^,{\["']|\{[^}]*\}|\[[^\]]*\]|"[^"]*"|'[^']*'|[{\["'])+""")
"""One of several with commas between them."""


def _quoted_texts(overrides: Sequence[str], *, sweeps: bool = False) -> list[str]:
    """Quotes texts that Hydra would read as another type, such as run.name=5e2, or could not read at all, such as
    {00..99}.tar, a column `a (b)`, ~/data, or a folder `cluster.workers=2` of a sweep.

    Args:
        sweeps: commas that are not within brackets stand between values, a job each.
    """

    def readable(override: str) -> str:
        key, _, value = override.partition("=")
        if key.startswith("hydra."):  # a folder, which Hydra itself makes
            value = at_home(value)
        may_be_null = text_settings().get(key.lstrip("+"))
        if may_be_null is None or (may_be_null and value == "null"):
            return override
        if FUNCTION.fullmatch(value) and key not in ("data.target", "data.text"):
            return override
        if value.startswith("[") and value.endswith("]") and key not in CHOICES:
            return f"{key}=[{','.join(_quoted(name.strip()) for name in value[1:-1].split(','))}]"
        if not sweeps and key not in PATHS and "," in value:  # Hydra says that this is for a sweep
            return override
        values = re.findall(VALUE, value) if sweeps else [value]
        return f"{key}={','.join(map(_quoted, values))}"

    return [readable(override) for override in overrides]


def _quoted(text: str) -> str:
    return text if text.startswith(("'", '"')) or "\\" in text else quoted(text)  # Hydra's sweeper writes \\:


def varied_keys(arguments: Sequence[str]) -> list[str]:
    """Returns the keys to which a sweep's command line gives several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    settings = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(settings)
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def _options(arguments: Sequence[str]) -> list[str]:
    """Returns Hydra's own options of a sweep's command line, but for -m."""
    words = [each for each in arguments if each.startswith("-") or not ("=" in each or each.startswith("~"))]
    return [word for word in words if word not in ("-m", "--multirun")]


def _checked(composed: Any, overrides: Sequence[str]) -> Config:
    """Returns the tree that Hydra composed as our dataclasses; `from_plain` checks it."""
    from omegaconf import OmegaConf

    for override in overrides:
        key, _, name = override.partition("=")
        if key.lstrip("+").startswith("sweep."):
            raise ConfigError(f"{override}: is for a sweep; add -m, and give a setting several values, as seed=1,2")
        if (group := key.removesuffix(".name")) in CHOICES and group != key:
            raise ConfigError(f"{override}: a name is not set by itself; choose {group}={name}")
    plain: Any = OmegaConf.to_container(composed, resolve=True)
    return from_plain(plain)


# -------------------------------------------------------------------------------------------- sentences for bad input


@contextlib.contextmanager
def bad_input_to(tell: Callable[[str], object]) -> Iterator[None]:
    """Passes the one sentence of an error of the user's input to `tell`; every other exception is raised on."""
    try:
        yield
    except Exception as error:
        message = translated(error)
        if message is None:
            raise
        tell(message)


def translated(error: BaseException) -> str | None:
    """Returns the sentence for a user's error, whichever library raised it, or None for any other error."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf import Node
    from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

    if isinstance(error, USER_ERRORS):
        return str(error)
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group in CHOICES:
            return str(unknown_choice(group, name))
        if "submitit" in name and not any("submitit" in option for option in error.options or ()):
            return f"{group}={name}: the launcher is not installed: pip install hydra-submitit-launcher"
        return str(not_among(group, name, error.options)) if error.options else first_line(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {' '.join(error.message.split('See https')[0].split())}"
    if isinstance(error, HydraException):
        if "interval" in str(error).lower():
            search = f"{program()} search 'optim.lr=interval(0.001,0.1)' --trials 20"
            return f"a range of values is searched, as in {search}; a sweep takes values one by one"
        if several := re.match("Ambiguous value for argument '((.*?)=(.*))'", str(error)):
            setting, key, values = several.groups()
            return f"{setting} has several values: put -m first for a sweep of them, or write a list, {key}=[{values}]"
        return (error.__cause__ and translated(error.__cause__)) or str(error)
    if isinstance(error, (InterpolationResolutionError, GrammarParseError)):
        ours = (str(each) for each in with_causes(error) if isinstance(each, ConfigError))
        return next(ours, f"{error.full_key}: {first_line(error)}")
    if isinstance(error, YAMLError):  # of a file in a folder of the user's own
        return " ".join(str(error).split())
    if isinstance(error, OmegaConfBaseException):
        if not error.full_key:
            return first_line(error)
        known = [str(key) for key in error.parent_node or () if key != "hydra"]
        root: Any = error.parent_node._get_root() if isinstance(error.parent_node, Node) else {}
        return str(unknown_key(error.full_key, known, chosen=chosen_in(root)))
    return None


def print_error(message: str) -> None:
    """Prints the one line for an error of the user's input."""
    say(f"error: {message}", to=sys.stderr)


def exit_with_error(message: str) -> NoReturn:
    """Prints the line and ends the process with the status for bad input."""
    print_error(message)
    sys.exit(2)


# ------------------------------------------------------------------------------------------------- start and wait


def train(config: Config, run_dir: Path, hosts: Hosts | None = None) -> int:
    """Starts the workers of a prepared run, waits, and prints how it ended; returns the status (see the table).

    Args:
        hosts: where processes of other hosts may join; None: nowhere.
    """
    from ddp.run.assembly.stages import finish
    from ddp.train.sidecar import has_ended, wait_for
    from ddp.train.supervision import WATCH

    cluster = config.cluster
    try:
        with with_sidecar(config, run_dir) as is_there:
            counts = {key: getattr(cluster, key) for key in ("servers", "restarts")}
            counts["workers"] = config.strategy.num_processes(cluster.workers)
            how: dict[str, Any] = {"threads": cluster.threads_per_worker, "logs": run_dir / "logs"}
            if hosts is not None:
                _invite(hosts, config, run_dir)
            how |= {"settings": settings_text(config), "hosts": hosts}
            ended = run_workers([str(run_dir.resolve())], elastic=elastic_of(config), **counts, **how)
            if is_there is not None and has_ended(run_dir):
                wait_for(run_dir, is_there, within_s=config.evaluate.wait_s)
    finally:
        if config.trial:
            forget_trial(run_dir)

    if ended.failures:
        _restore_terminal()
        cause = describe_failures(ended.failures, run_dir / "logs", cluster.servers)
        say(cause.text, to=sys.stderr)
        return 4 if cause.report is not None and cause.report.type == TooFewWorkers.__name__ else 1
    if config.trial or (run_dir / "summary.json").exists():  # it does not after a signal before the first step
        finish(config, run_dir)
    stopped_by = ended.signal or _agreed_stop(run_dir)
    if stopped_by is None:
        return 3 if _stopped_by(run_dir).startswith(WATCH) else 0
    if _agreed_stop(run_dir) is not None:
        outcome = f"continue with {train_command(setting_for(run_dir, config.run.name), 'resume=auto')}"
    else:
        outcome = "nothing was saved at the stop"
        ranks = range(cluster.servers + config.strategy.num_processes(cluster.workers))
        reports = [Report.read(Seat(run_dir / "logs", rank, cluster.servers)) for rank in ranks]
        failed = [report for report in reports if report is not None]
        if failed:  # the stop itself went wrong
            say(min(failed, key=lambda r: (r.is_secondary, r.time_s)).block(), to=sys.stderr)
    say(f"stopped by {stopped_by.name}; {outcome}", to=sys.stderr)
    return 128 + stopped_by


def _open_to_hosts(config: Config) -> Hosts | None:
    """Serves the store in which hosts meet for an elastic run at MASTER_ADDR and MASTER_PORT; None without these."""
    if not {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ):
        return None
    address, port = store_address(
        os.environ, because="cluster.min_workers", all_of_them="hosts", keeper="this launcher"
    )
    if steps := config.checkpoint.memory_steps:
        raise ConfigError(
            f"checkpoint.memory_steps={steps} with MASTER_ADDR={address}: it is for a run on one host; take "
            f"checkpoint.every_steps={steps}, or unset MASTER_ADDR"
        )
    from ddp.comm.meeting.rendezvous import open_to_hosts

    return open_to_hosts(address, port)


def _invite(hosts: Hosts, config: Config, run_dir: Path) -> None:
    """Lets processes of other hosts join this run."""
    from ddp.comm.meeting.rendezvous import describe_to_hosts

    run = {"config": asdict(config), "run_dir": str(run_dir.resolve()), "typed": typed(), "workers": 0}
    describe_to_hosts(hosts, run)
    if not is_on_loopback(hosts.address):
        where = f"MASTER_ADDR={hosts.address} MASTER_PORT={hosts.port}"
        say(f"other hosts join with {where} scripts/ddp train cluster.role=worker")


def _agreed_stop(run_dir: Path) -> signal.Signals | None:
    """Returns the signal on which the workers agreed to stop, whichever of them got it."""
    return signal.Signals.__members__.get(_stopped_by(run_dir))  # else it has stopped early by itself


def _stopped_by(run_dir: Path) -> str:
    """Returns why the workers have agreed to stop; "" if they have not."""
    with contextlib.suppress(OSError, ValueError):
        return read_summary(run_dir).get("stopped_by") or ""
    return ""


def _restore_terminal() -> None:
    """Shows the cursor, which the progress bar of a killed rank 0 may have hidden."""
    if sys.stderr.isatty():
        console(stderr=True).show_cursor()
        say("", to=sys.stderr)
