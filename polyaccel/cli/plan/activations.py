"""The activations that `polyaccel plan --sequence-length` asks for."""

from __future__ import annotations

import argparse
from pathlib import Path

from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.errors import PolyaccelError
from polyaccel.planner.activations import ActivationNeeds
from polyaccel.planner.pass_settings import PassSettings, check_activation_mesh


def foretold(args: argparse.Namespace, config: ResolvedConfig, rows: int | None = None) -> tuple[ActivationNeeds, ...]:
    """Return the needs of the model that `args.model` names, on `rows` (those of the arguments or the config) of
    `args.sequence_length` tokens; empty where that is None. Only for that torch is needed. Raises PolyaccelError for a
    model without a config.json, and for ranks that share other things than layers or sequences."""
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
    check_activation_mesh(mesh)
    from polyaccel.torch.estimate.rank_share import rank_activations

    settings = PassSettings.of(config, mesh)
    shape = (rows or args.batch or settings.micro_batch, args.sequence_length)
    return rank_activations(Path(args.model), shape, settings)
