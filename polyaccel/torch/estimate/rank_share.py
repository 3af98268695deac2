"""What `polyaccel plan` asks of a torch model: the shapes of a rank's share, and the activations of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import choose_accelerator, host_accelerator
from polyaccel.comm.arguments import check_members
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective
from polyaccel.comm.work import DONE, Work
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.table import PipelineTable
from polyaccel.planner.model import ActivationNeeds, ModelShape, StageNeeds
from polyaccel.planner.pass_settings import PassSettings
from polyaccel.torch.context_parallel import apply_context_parallel
from polyaccel.torch.context_parallel.settings import SequenceSettings
from polyaccel.torch.estimate.activation_memory import foretell_activations
from polyaccel.torch.estimate.meta_shapes import (
    model_of_directory,
    model_of_function,
    shape_of_directory,
    shape_of_function,
)
from polyaccel.torch.estimate.stage_memory import estimate_stage_memory
from polyaccel.torch.experts.models import cut_expert_shapes, has_experts
from polyaccel.torch.profiling.forward_work import product_speed
from polyaccel.torch.settings import TileSettings
from polyaccel.torch.tensor_parallel.make_plan import plan_by, shared_by
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module
from polyaccel.torch.tiled.models import TiledModel
from polyaccel.torch.tiled.tokenwise import TokenwiseLayers


def rank_shape(name: str, settings: PassSettings) -> ModelShape:
    """Return a rank's shape of the model `name`, a directory or `module:function`."""
    share_layers = shared_by(settings.tensor_ranks, settings.cuts)

    def change(model: nn.Module) -> None:
        share_layers(model)
        if settings.expert_ranks > 1:
            cut_expert_shapes(model, settings.expert_ranks)

    if Path(name).is_dir():
        return shape_of_directory(Path(name), settings.rules, change)
    return shape_of_function(name, settings.rules, change)


def rank_activations(directory: Path, shape: tuple[int, int], settings: PassSettings) -> tuple[ActivationNeeds, ...]:
    """Return the needs of the first rank's pass on `shape`, (rows, tokens)."""

    def share(model: nn.Module) -> None:
        """Do to a model what `initialize` does on the first rank."""
        _share_layers(model, settings)
        _share_sequences(model, settings)

    return foretell_activations(
        lambda: model_of_directory(directory),
        shape,
        settings.rules,
        settings.recompute,
        autocast=settings.autocast,
        prepare=share,
    )


def rank_stages(
    name: str, shape: tuple[int, int] | None, settings: PassSettings, table: PipelineTable
) -> tuple[StageNeeds, ...]:
    """Return the needs of the first rank of every stage, as `estimate_stage_memory`."""

    def spread(model: nn.Module) -> None:
        if has_experts(model):
            cut_expert_shapes(model, settings.expert_ranks)

    return estimate_stage_memory(
        _builder(name, table.stages),
        shape,
        settings.rules,
        settings.recompute,
        table,
        "parameters" if settings.partition == "best" else settings.partition,
        autocast=settings.autocast,
        share=lambda model: _share_layers(model, settings),
        spread=spread if settings.expert_ranks > 1 else None,
        prepare=lambda model: _share_sequences(model, settings),
    )


def accelerator_speed() -> tuple[str, float]:
    """Return this machine's accelerator, by name, and its operations a second in a large product."""
    accelerator = choose_accelerator(None)
    return accelerator.name, product_speed(accelerator)


def _builder(name: str, stages: int) -> Callable[[], nn.Module]:
    if Path(name).is_dir():
        return lambda: model_of_directory(Path(name))
    if ":" in name:
        return lambda: model_of_function(name, "on tensors without values")
    raise PolyaccelError(
        f"it is unknown along which blocks {name!r} is cut into {stages} stages",
        hint='give a directory with a config.json or module:function, or leave "pipeline" out; polyaccel plan '
        "--pipeline says what stages do and how long",
        value=name,
    )


def _share_layers(model: nn.Module, settings: PassSettings) -> None:
    """Cut `model` as the first of its tensor ranks has it, if there are some. It runs on tensors without values."""
    if (ranks := settings.tensor_ranks) > 1:
        parallelize_module(model, FakeCommunicator(ranks, host_accelerator()), plan_by(model, ranks, settings.cuts))


def _share_sequences(model: nn.Module, settings: PassSettings) -> None:
    """Let `model` run on the first rank's share of sequences, and in tiles, where the settings say so."""
    method = settings.sequence_method
    if settings.sequence_ranks > 1 and method != "manual":
        ranks = FakeCommunicator(settings.sequence_ranks, host_accelerator())
        if method == "tokenwise":
            TokenwiseLayers(model, ranks)
        else:
            apply_context_parallel(model, ranks, SequenceSettings(method, settings.core_attention))
    if settings.tiles is not None:
        TiledModel(model, TileSettings(**settings.tiles))


class FakeCommunicator(Communicator):
    """The first of `world_size` ranks, to which the others send nothing: collectives leave their buffers as they are,
    and of objects the others have the same. For tensors without values, so memory is not looked at either."""

    def __init__(self, world_size: int, accelerator: Accelerator) -> None:
        self.rank = 0
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        self.backend = "absent"
        self.accelerator = accelerator
        self.timeout_s = 0.0

    def call(self, collective: Collective) -> Work:
        return self.start(collective)

    def start(self, collective: Collective) -> Work:
        return DONE

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        check_members("split", tuple(ranks), self.world_size)
        return FakeCommunicator(len(ranks), self.accelerator) if self.rank in ranks else None

    def close(self) -> None:
        return None
