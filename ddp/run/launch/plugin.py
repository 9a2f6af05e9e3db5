"""Hydra's side: addresses as choices, a launcher that runs each job of a sweep as a process, and the table at the end.

`hydra/launcher=jobs` is the default. Hydra takes launchers from its own namespace alone, where `register` puts this
one. With another launcher (submitit's, joblib's, Hydra's basic one) each job calls the task function of
`command_line.py`, and that does for one job what this launcher does for all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp.errors import ConfigError
from ddp.process.arguments import relative_path, train_command
from ddp.process.terminal import say
from ddp.run.launch import sweep
from ddp.run.launch.sweep import Job
from ddp.run.settings.address import is_address
from ddp.run.settings.config import OWN, Sweep, choose
from ddp.run.settings.reader import from_plain


def objective(job: Job, sweeper: DictConfig) -> float:
    """Returns the objective of a sweeper: the main metric; NaN if there is none and the sweeper needs none.

    Whether more is better is the sweeper's setting: Optuna's, say, has hydra.sweeper.direction=maximize.

    Raises:
        ConfigError: there is none, and the sweeper is not Hydra's basic one, which needs none.
    """
    if job.objective is not None:
        return job.objective
    if str(sweeper._target_).endswith(".BasicSweeper"):
        return math.nan
    raise ConfigError(f"{relative_path(job.run_dir)}/ has no objective: {sweep.ending(job)}; see its logs")


class Jobs(Launcher):
    """Runs the jobs of a batch, `sweep.parallel` at a time."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes over what Hydra knows; refuses settings of the sweep that cannot work."""
        self.context, self.config, self.options = hydra_context, config, getattr(task_function, "options", ())
        if varied := [each for each in getattr(task_function, "varied", ()) if each.startswith("sweep.")]:
            raise ConfigError(f"{varied[0]}: all jobs of a sweep share it; give it one value")
        self.settings: Sweep = from_plain({"sweep": OmegaConf.to_container(config.sweep)}).sweep
        sweep.check_parallel(self.settings.parallel)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs one job for each entry; returns their objectives."""
        setup_globals()
        todo = [self._job(list(overrides), number) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        folder, found = Path(self.config.hydra.sweep.dir).absolute(), {job.run_dir: job for job in todo}
        for job in todo:
            sweep.earlier(job)  # refuses before the first one begins
        stopped = sweep.run(
            iter([*found.values()]),
            folder,
            parallel=self.settings.parallel,
            options=self.options,
            ended=lambda job: found.update({job.run_dir: job}),
        )
        if stopped is not None:
            sweep.report_jobs(folder)
            say(f"the sweep continues with {train_command(*sweep.again(sys.argv[1:], folder))}", to=sys.stderr)
            sys.exit(stopped)
        return [self._returned(found[job.run_dir]) for job in todo]

    def _job(self, overrides: list[str], number: int) -> Job:
        """Composes a job, as Hydra's own launcher does; returns its settings and folder."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        return of_sweep(config.hydra.overrides.task, Path(config.hydra.sweep.dir, config.hydra.sweep.subdir).absolute())

    def _returned(self, job: Job) -> JobReturn:
        returned = JobReturn(overrides=job.overrides, working_dir=str(job.run_dir), status=JobStatus.COMPLETED)
        try:
            returned.return_value = objective(job, self.config.hydra.sweeper)
        except ConfigError as error:
            returned.status, returned.return_value = JobStatus.FAILED, error
        return returned


def of_sweep(overrides: Sequence[str], run_dir: Path) -> Job:
    """Returns the job of these settings, without those of the sweep as a whole."""
    return Job([each for each in overrides if not each.lstrip("+").startswith("sweep.")], run_dir)


class Table(Callback):
    """Ends a sweep: gathers, writes and prints its table, and ends the process with its status."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Writes the table. Hydra calls this once all jobs have ended."""
        sys.exit(sweep.report_jobs(Path(config.hydra.sweep.dir).absolute()))


class Addresses(ConfigSource):
    """Hydra's source for names with a colon, in the groups that take one."""

    @staticmethod
    def scheme() -> str:
        return "address"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        content = OmegaConf.create(asdict(choose(group, name)))
        return ConfigResult(self.provider, self.full_path(), content, header={"package": None})

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        return group in OWN and is_address(name)

    def is_group(self, config_path: str) -> bool:
        return config_path in OWN

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def register() -> None:
    """Makes addresses and `hydra/launcher=jobs` known to Hydra, which finds launchers below this name alone."""
    namespace = "hydra_plugins"
    Plugins.instance().register(Addresses)  # the instance has imported the others
    if namespace not in sys.modules:
        sys.modules[namespace] = ModuleType(namespace)
        sys.modules[namespace].__path__ = []
    sys.modules[f"{namespace}.ddp"] = sys.modules[__name__]
    Jobs.__module__ = f"{namespace}.ddp"
    Plugins.instance().register(Jobs)
    ConfigStore.instance().store("jobs", {"_target_": f"{namespace}.ddp.Jobs"}, group="hydra/launcher", provider="ddp")
