"""The monitors that have their own section: `tensorboard`, `csv_monitor`, `wandb`, `comet`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from polyaccel.config.section import PositiveInt, Section


class MonitorSection(Section):
    """A monitor that is on where `enabled` is true; the other keys are its options."""

    plugin: ClassVar[str]
    """The name of its plugin."""
    enabled: bool = False
    """Write the figures of each step."""

    @property
    def options(self) -> dict[str, Any]:
        """What the plugin is given: the keys that are not at their defaults."""
        given = self.model_dump(exclude_defaults=True)
        given.pop("enabled", None)
        return given


class TensorBoardConfig(MonitorSection):
    """Event files for TensorBoard. Needs the extra `tensorboard`."""

    plugin = "tensorboard"
    output_path: str = ""
    """The folder of the files; "" is `tensorboard` in `run_dir`."""
    job_name: str = ""
    """A folder below that one; "" is none."""


class CsvMonitorConfig(MonitorSection):
    """A CSV file for each figure, with the columns step and value."""

    plugin = "csv"
    output_path: str = ""
    """The folder of the files; "" is `csv` in `run_dir`."""
    job_name: str = ""
    """A folder below that one; "" is none."""


class WandbConfig(MonitorSection):
    """A run of Weights & Biases. Needs the extra `wandb`. The environment variable WANDB_MODE=offline
    keeps it on this machine, below `run_dir`."""

    plugin = "wandb"
    project: str | None = None
    """The project; null is the library's own choice."""
    group: str | None = None
    """The group of runs that this one belongs to."""
    team: str | None = None
    """The team, or the user, whose project it is; null is the user's default."""


class CometConfig(MonitorSection):
    """An experiment of Comet. Needs the extra `comet`."""

    plugin = "comet"
    samples_log_interval: PositiveInt = 1
    """Samples between two steps whose figures are sent; those between are left out."""
    project: str | None = None
    """The project; null is the library's own choice."""
    workspace: str | None = None
    """The workspace; null is the user's default."""
    api_key: str | None = None
    """The key of the account. Better in the environment variable COMET_API_KEY: configs are copied and read."""
    experiment_name: str | None = None
    """The name that people read."""
    experiment_key: str | None = None
    """The experiment to write to; null is a new one."""
    online: bool | None = None
    """False writes an archive below `run_dir`, which `comet upload` sends; null is true."""
    mode: Literal["get_or_create", "create", "get"] | None = None
    """Whether `experiment_key` names an experiment that is there ("get"), is not ("create"), or either."""
