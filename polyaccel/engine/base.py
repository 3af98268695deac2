"""What every frontend has in common: the `ModelAdapter` that shows a model to the ZeRO step, and the `Engine` that
users hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from polyaccel.buffer import Buffer
from polyaccel.types import ParamSpec
from polyaccel.zero.params import ParamObserver


class ModelAdapter(ParamObserver, ABC):
    """A model as the ZeRO step sees it: named flat parameters, nothing else."""

    @abstractmethod
    def param_specs(self) -> Sequence[ParamSpec]:
        """Every parameter once (tied ones under their first name), in the order in which gradients appear."""

    @abstractmethod
    def read_param(self, fqn: str) -> Buffer:
        """The parameter's present value, flat, in the precision that the model was built with."""

    @abstractmethod
    def on_bound(self, fqn: str, view: Buffer) -> None:
        """From now on the model's parameter lives in `view`, which holds its value already."""

    @abstractmethod
    def release(self) -> None:
        """Take back whatever was attached to the model. It keeps its parameters' values."""


class Engine(ABC):
    """A model in training. Frontends add what their framework's users expect."""

    @abstractmethod
    def train_batch(self, data_iter: Any = None) -> Any:
        """One optimizer step: all its micro-batches from `data_iter`. Returns their mean loss."""

    @abstractmethod
    def eval_batch(self, data_iter: Any) -> Any:
        """The loss of one micro-batch, without gradients."""

    @abstractmethod
    def step(self) -> None:
        """Update at the accumulation boundary; elsewhere only count the micro-batch."""

    @abstractmethod
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything needed to go on exactly. Every rank calls it. Raises CheckpointError."""

    @abstractmethod
    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str, dict[str, Any]]:
        """Go on from a checkpoint of any world size; returns its path and client state. Raises CheckpointError."""

    @abstractmethod
    def destroy(self) -> None:
        """Give back memory, hooks and connections. The model stays usable."""
