"""DeepSpeed's checkpoints as polyaccel's: ZeRO 1 to 3, and universal ones, of DeepSpeed 0.19.8.

`polyaccel ckpt import SRC DIR --from deepspeed` finds this by the entry point of the package. Files are read by torch
with `weights_only=True`: the few classes of DeepSpeed that its checkpoints name are made of stand-ins, and a
file that names anything else is refused by that name. Nothing of DeepSpeed has to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

from torch import Tensor

from polyaccel.checkpoint.convert.exporting import BUFFER
from polyaccel.checkpoint.convert.formats.torch_files import in_tensor, optimizer_from, with_schedule
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.core.tagged_json import is_serializable
from polyaccel.errors import CheckpointError
from polyaccel_deepspeed.exchange.experts import FILE, Stacks, stack_of
from polyaccel_deepspeed.exchange.states import (
    PARAM,
    StandIn,
    add_groups,
    joined,
    load_file,
    stage_3,
    stages_1_and_2,
    universal,
)

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "momentum", "bias_correction")
OWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
        "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
    }
)  # fmt: skip
"""What DeepSpeed writes next to the client state."""


def read(source: Path) -> Incoming:
    """The checkpoint at `source`: the folder that DeepSpeed's `save_checkpoint` was given, or that of one tag.

    Parameters are the master weights where there are some. Raises CheckpointError, naming the file, for what is not
    one, was saved under tensor or pipeline parallelism, or names a class that no checkpoint needs.
    """
    folder = _folder(source)
    origin = f"the optimizer in {folder}"
    models = _by_rank(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    model = load_file(models[0]) if models else {}
    if not models or len(list(folder.glob("*mp_rank_01*"))) or _stages(model) > 1:
        what = "tensor or pipeline parallel ranks saved it" if models else "it has no mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{folder} is not a checkpoint of ZeRO that can be read: {what}",
            hint="give the folder that DeepSpeed's save_checkpoint was given, of a run with one model-parallel rank",
            value=str(folder),
        )
    if layers := _by_rank(folder, r"layer_(\d+)-model_states\.pt"):
        model = {**model, "module": _of_layers(layers)}
    if (folder / "zero").is_dir():
        found, groups, scaler = universal(folder, model)
    elif isinstance(model.get("optimizer"), Mapping):
        incoming = _with_progress(Incoming([*_untrained(model, models, set())]), model, None)
        return optimizer_from(model["optimizer"], origin).joined(incoming, steps=_updates(incoming))
    else:
        optims = [
            load_file(file) for file in _by_rank(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
        ]
        states = [_mapping(each, "optimizer_state_dict", folder) for each in optims]
        if not states:
            lost = LeftOut(f"{folder}/zero_pp_rank_*_optim_states.pt", "the file is missing", is_needed=True)
            return _with_progress(Incoming([*_untrained(model, models, set())], left_out=[lost]), model, None)
        flat = "fp32_flat_groups" in states[0]
        found = stage_3(states, model, origin) if flat else stages_1_and_2(states, model, origin)
        groups = _mapping(states[0], "optimizer_state_dict" if flat else "base_optimizer_state", folder)["param_groups"]
        scaler = states[0].get("loss_scaler")
    named = {tensor.fqn for tensor in found.tensors}
    weights = [tensor for tensor in found.tensors if tensor.kind == PARAM]
    found.tensors = [tensor for tensor in found.tensors if tensor.kind != PARAM]
    add_groups(found, groups, model)
    tensors = [*weights, *_untrained(model, models, named), *_other_experts(folder, named)]
    incoming = _with_progress(Incoming(tensors), model, scaler)
    return found.joined(incoming, steps=_updates(incoming))


def _updates(incoming: Incoming) -> int:
    return incoming.counters["global_steps"] - incoming.counters["skipped_steps"]


def _stages(model: Mapping[str, Any]) -> int:
    """How many pipeline stages saved the checkpoint."""
    dimensions = model.get("checkpoint_parallel_dimensions")
    degree = dimensions.get("pp_degree") if isinstance(dimensions, Mapping) else None
    return degree if isinstance(degree, int) else 1


def _of_layers(files: Sequence[Path]) -> dict[str, Any]:
    """The module of a PipelineModule, whose layers have a file each."""
    named = {file: re.fullmatch(r"layer_(\d+)-model_states\.pt", file.name) for file in files}
    return {
        f"{int(match[1])}.{name}": value
        for file, match in named.items()
        if match is not None
        for name, value in load_file(file).items()
    }


def _with_progress(incoming: Incoming, model: Mapping[str, Any], scaler: Any) -> Incoming:
    config = model.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps")
    accumulation = accumulation if isinstance(accumulation, int) else 1
    steps = int(model.get("global_steps", 0))
    schedule = model.get("lr_scheduler")
    if schedule is not None:
        incoming = with_schedule(incoming, schedule, "the schedule")
    of_client = {key: value for key, value in model.items() if key not in OWN_KEYS}
    left_out = [
        LeftOut(f"{key!r} of the client state", f"a {type(value).__name__}, no plain value")
        for key, value in of_client.items()
        if not is_serializable(value)
    ]
    return replace(
        incoming,
        counters={
            "micro_steps": steps * accumulation,
            "global_steps": steps,
            "global_samples": int(model.get("global_samples", 0)),
            "skipped_steps": int(model.get("skipped_steps", 0)),
            "gradient_accumulation_steps": accumulation,
        },
        loss_scaler=_loss_scale(scaler),
        client_state={key: value for key, value in of_client.items() if is_serializable(value)},
        tied_weights={str(name): str(first) for name, first in (model.get("shared_params") or {}).items()},
        left_out=[*incoming.left_out, *left_out],
    )


def _untrained(model: Mapping[str, Any], files: Sequence[Path], trained: set[str]) -> Iterator[ImportTensor]:
    """Buffers and frozen parameters."""
    buffers, shared = set(model.get("buffer_names") or ()), model.get("shared_params") or {}
    fragments = model.get("frozen_param_fragments") or {}
    shapes = model.get("frozen_param_shapes") or {}
    cut = len(files) > 1
    others = [load_file(file).get("frozen_param_fragments") or {} for file in files[1:]] if cut and fragments else []
    for fqn, tensor in model["module"].items():
        if fqn in trained or fqn in shared or not isinstance(tensor, Tensor):
            continue
        if fqn in buffers:
            yield in_tensor(fqn, BUFFER, tensor, files[0])
        elif fqn in fragments and cut:
            yield joined(
                fqn,
                PARAM,
                tuple(shapes[fqn]),
                [part[fqn].reshape(-1) for part in (model["frozen_param_fragments"], *others)],
            )
        else:
            yield in_tensor(fqn, PARAM, tensor, files[0])


def _other_experts(folder: Path, known: set[str]) -> Iterator[ImportTensor]:
    """Experts' parameters that no optimizer has, from their own files."""
    stacks = Stacks()
    for file in sorted(file for file in folder.iterdir() if re.fullmatch(FILE, file.name)):
        for fqn, tensor in load_file(file).items():
            expert = stack_of(fqn)
            if expert is not None and expert[0] not in known:
                stacks.add(expert[0], PARAM, expert[1], tuple(tensor.shape), [tensor.reshape(-1)])
    yield from starmap(joined, stacks.whole())


def _loss_scale(scaler: Any) -> dict[str, Any]:
    fields = dict(vars(scaler)) if isinstance(scaler, StandIn) else {}
    if not fields.get("dynamic"):
        return {}
    good = int(fields.get("cur_iter", 0)) - int(fields.get("last_overflow_iter", -1)) - 1
    tolerance = max(1, int(fields.get("cur_hysteresis", 1)))
    return {"loss_scale": float(fields["cur_scale"]), "good_steps": max(0, good), "tolerance": tolerance}


def _folder(source: Path) -> Path:
    if list(source.glob("*mp_rank_00_model_states.pt")):
        return source
    for name in ("latest", "latest_universal"):
        if (source / name).is_file():
            tag = (source / name).read_text(encoding="utf-8", errors="replace").strip()
            if tag and Path(tag).name == tag and (source / tag).is_dir():
                return source / tag
            raise CheckpointError(f"{source / name} names {tag!r:.100}, which is not a folder there", value=tag)
    raise CheckpointError(
        f"{source} is not a checkpoint of DeepSpeed: it has neither mp_rank_00_model_states.pt nor latest",
        hint="give the folder that DeepSpeed's save_checkpoint was given, or that of a tag",
        value=str(source),
    )


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    found = {file: re.fullmatch(pattern, file.name) for file in folder.iterdir()}
    return sorted(
        (file for file, match in found.items() if match), key=lambda file: int((found[file] or [0, 0])[1] or 0)
    )


def _mapping(tree: Any, key: str, folder: Path) -> Mapping[str, Any]:
    found = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"the files of ranks in {folder} have no {key}", hint="fetch them again", value=key)
    return found
