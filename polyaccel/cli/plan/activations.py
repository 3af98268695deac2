"""The activations that `polyaccel plan --sequence-length` foretells."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.errors import PolyaccelError
from polyaccel.planning.activations import ActivationNeeds
from polyaccel.policies import module_rules_of, recompute_policy_of


def foretold(args: argparse.Namespace, config: ResolvedConfig) -> tuple[ActivationNeeds, ...]:
    """The needs of the model that `args.model` names, on rows of `args.sequence_length` tokens; empty where that is
    None. Only for that torch is needed. Raises PolyaccelError for a model without a config.json, and for ranks that
    share layers or sequences."""
    if args.sequence_length is None:
        if args.batch is not None:
            raise PolyaccelError(
                f"--batch {args.batch}, and nothing says how long its rows are",
                cure="add --sequence-length: activations depend on both",
                value=args.batch,
            )
        return ()
    if not Path(args.model).is_dir():
        raise PolyaccelError(
            f"the activations of {args.model!r} cannot be foretold: it is no directory with a config.json",
            cure="leave --sequence-length out, or give the directory of a language model of transformers",
            value=args.model,
        )
    shared = [axis.name for axis in mesh_of(config, args.world_size).axes if axis.name != "data" and axis.size > 1]
    if shared:
        raise PolyaccelError(
            f"activations are not foretold where ranks stand along {' and '.join(shared)}",
            cure="leave --sequence-length out, or plan for data ranks alone",
            value=tuple(shared),
        )
    from polyaccel.torch.params.meta_shapes import model_of_directory
    from polyaccel.torch.recompute.foretelling import foretell_activations
    from polyaccel.torch.settings import TileSettings
    from polyaccel.torch.tiles.models import TiledModel

    def tile(model: Any) -> None:
        if config.tiled_compute.enabled:
            TiledModel(model, TileSettings(**config.tiled_compute.model_dump(exclude={"enabled"})))

    rows = args.batch or config.train_micro_batch_size_per_gpu
    return foretell_activations(
        lambda: model_of_directory(Path(args.model)),
        (rows, args.sequence_length),
        module_rules_of(config),
        recompute_policy_of(config),
        autocast=config.torch_autocast.dtype if config.torch_autocast.enabled else None,
        prepare=tile,
    )
