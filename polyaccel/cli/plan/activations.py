"""The activations that `polyaccel plan --sequence-length` estimates."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.core.mesh import Mesh
from polyaccel.engine.policies.modules import cut_rules_of, module_rules_of, recompute_policy_of
from polyaccel.errors import PolyaccelError
from polyaccel.planner.activations import ActivationNeeds


def foretold(args: argparse.Namespace, config: ResolvedConfig) -> tuple[ActivationNeeds, ...]:
    """The needs of the model that `args.model` names, on rows of `args.sequence_length` tokens; empty where that is
    None. Only for that torch is needed. Raises PolyaccelError for a model without a config.json, and for ranks that
    share layers or sequences."""
    if args.sequence_length is None:
        if args.batch is not None:
            raise PolyaccelError(
                f"--batch {args.batch}, and the length of its rows is not set",
                hint="add --sequence-length: activations depend on both",
                value=args.batch,
            )
        return ()
    if not Path(args.model).is_dir():
        raise PolyaccelError(
            f"the activations of {args.model!r} cannot be estimated: it is not a directory with a config.json",
            hint="leave --sequence-length out, or give the directory of a language model of transformers",
            value=args.model,
        )
    mesh = mesh_of(config, args.world_size)
    others = [axis.name for axis in mesh.axes if axis.name not in ("data", "tensor", "sequence") and axis.size > 1]
    if others:
        raise PolyaccelError(
            f"activations are not estimated where ranks stand along {' and '.join(others)}",
            hint="leave --sequence-length out, or plan for ranks along data, tensor and sequence alone",
            value=tuple(others),
        )
    from polyaccel.torch.estimate.activation_memory import foretell_activations
    from polyaccel.torch.estimate.meta_shapes import model_of_directory

    def share(model: Any) -> None:
        """Do to a model what `initialize` does on the first rank."""
        share_layers(model, config, mesh)
        share_sequences(model, config, mesh)

    rows = args.batch or config.train_micro_batch_size_per_gpu
    return foretell_activations(
        lambda: model_of_directory(Path(args.model)),
        (rows, args.sequence_length),
        module_rules_of(config),
        recompute_policy_of(config),
        autocast=config.torch_autocast.dtype if config.torch_autocast.enabled else None,
        prepare=share,
    )


def share_layers(model: Any, config: ResolvedConfig, mesh: Mesh) -> None:
    """Cut `model` as the first of its tensor ranks has it, if there are some. It runs on tensors without values."""
    if (ranks := mesh.size_of(("tensor",))) > 1:
        from polyaccel.accelerators.detect import host_accelerator
        from polyaccel.comm.collectives.fake import FakeCommunicator
        from polyaccel.torch.tensor_parallel.make_plan import plan_by
        from polyaccel.torch.tensor_parallel.parallelize import parallelize_module

        parallelize_module(
            model, FakeCommunicator(ranks, host_accelerator()), plan_by(model, ranks, cut_rules_of(config))
        )


def share_sequences(model: Any, config: ResolvedConfig, mesh: Mesh) -> None:
    """Let `model` run on the first rank's share of sequences, and in tiles, by `config`."""
    section = config.sequence_parallel
    if (ranks := mesh.size_of(("sequence",))) > 1 and section.method != "manual":
        from polyaccel.accelerators.detect import host_accelerator
        from polyaccel.comm.collectives.fake import FakeCommunicator
        from polyaccel.torch.context_parallel import apply_context_parallel
        from polyaccel.torch.context_parallel.settings import SequenceSettings

        settings = SequenceSettings(section.method, section.core_attention)
        apply_context_parallel(model, FakeCommunicator(ranks, host_accelerator()), settings)
    if config.tiled_compute.enabled:
        from polyaccel.torch.settings import TileSettings
        from polyaccel.torch.tiled.models import TiledModel

        TiledModel(model, TileSettings(**config.tiled_compute.model_dump(exclude={"enabled"})))
