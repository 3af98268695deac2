"""What shows a frontend's model to the ZeRO step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ParamSpec
from polyaccel.zero.buckets.param_listener import ParamListener


class ModelAdapter(ParamListener):
    """A model as the ZeRO step sees it: named flat parameters, nothing else."""

    @abstractmethod
    def param_specs(self) -> Sequence[ParamSpec]:
        """Every parameter once (tied ones under their first name), in the order in which gradients appear."""

    @abstractmethod
    def unit_names(self) -> Mapping[str, str]:
        """The unit of each parameter: those of a unit are gathered at once."""

    def part_names(self) -> Mapping[str, str]:
        """Return each parameter's part, "" by default: parts get gradients in different backward passes."""
        return {}

    def update_names(self) -> Mapping[str, str]:
        """The kind of each parameter's update, "" by default. A bucket holds parameters of one kind."""
        return {}

    @abstractmethod
    def on_bound(self, fqn: str, view: Buffer) -> None:
        """From now on the model's parameter lives in `view`, which holds its value already."""

    @abstractmethod
    def release(self) -> None:
        """Take back whatever was attached to the model. It keeps its parameters' values."""
