"""DeepSpeed's checkpoints as polyaccel's: ZeRO 1 to 3, and universal ones, of DeepSpeed 0.19.8.

`polyaccel ckpt import SRC DIR --from deepspeed` finds this by the entry point of the package. Files are read by torch
with `weights_only=True`: the few classes of DeepSpeed that its checkpoints name are made of the stand-ins below, and a
file that names anything else is refused by that name. Nothing of DeepSpeed has to be installed.

[Note: DeepSpeed's flat groups]
At stages 1 and 2 an optimizer group is one flat vector, of which each rank saved a part: `param_slice_mappings` says
which elements of it belong to which parameter, so a parameter is what ranks have of it, in the order of ranks. At stage
3 every parameter is cut in as many equal parts as there are ranks, the last filled up: a rank saved its parts of all
parameters one after the other, in the order of `param_shapes`, in groups of which only the sequence counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import CheckpointError
from polyaccel.exchange.exporting import BUFFER
from polyaccel.exchange.formats.torch_bin import in_tensor
from polyaccel.exchange.importing import Incoming, InTensor
from polyaccel.plain import is_plain
from polyaccel_deepspeed.exchange.experts import FILE, Stacks, owners, stack_of

PARAM = "param"
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "momentum", "bias_correction")
OWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
        "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
    }
)  # fmt: skip
"""What DeepSpeed writes beside the client state."""


class StandIn:
    """An object of a class of DeepSpeed: its attributes, and none of its methods."""

    numel: int
    start: int

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


_ALLOWED: list[Any] = [
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (StandIn, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def read(source: Path) -> Incoming:
    """The checkpoint at `source`: the folder that DeepSpeed's `save_checkpoint` was given, or that of one tag.

    Parameters are the master weights where there are some. Raises CheckpointError, naming the file, for what is no such
    checkpoint, was saved under tensor or pipeline parallelism, or names a class that no checkpoint needs.
    """
    folder = _folder(source)
    models = _by_rank(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    if not models or len(list(folder.glob("*mp_rank_01*"))) or _by_rank(folder, r"layer_(\d+)-.*"):
        what = "tensor or pipeline parallel ranks saved it" if models else "it has no mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{folder} is no checkpoint of ZeRO that can be read: {what}",
            cure="give the folder that DeepSpeed's save_checkpoint was given, of a run with one model-parallel rank",
            value=str(folder),
        )
    model = _loaded(models[0])
    if (folder / "zero").is_dir():
        found, steps, groups, scaler = _universal(folder, model)
    else:
        optims = [
            _loaded(file) for file in _by_rank(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
        ]
        states = [_mapping(each, "optimizer_state_dict", folder) for each in optims]
        if not states:
            raise CheckpointError(
                f"{folder} has no zero_pp_rank_*_optim_states.pt: ZeRO was off",
                cure="import the `module` of its model_states.pt as a state dict, with --from bin",
                value=str(folder),
            )
        flat = "fp32_flat_groups" in states[0]
        found, steps = _stage_3(states, model) if flat else _stages_1_and_2(states, model)
        groups = _mapping(states[0], "optimizer_state_dict" if flat else "base_optimizer_state", folder)["param_groups"]
        scaler = states[0].get("loss_scaler")
    named = {tensor.fqn for tensor in found}
    tensors = [*found, *_untrained(model, models, named), *_other_experts(folder, named)]
    return _with_progress(Incoming(tensors, steps=steps, groups=_hyperparameters(groups)), model, scaler)


def _with_progress(incoming: Incoming, model: Mapping[str, Any], scaler: Any) -> Incoming:
    config = model.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps")
    accumulation = accumulation if isinstance(accumulation, int) else 1
    steps = int(model.get("global_steps", 0))
    schedule = model.get("lr_scheduler")
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
        lr_scheduler=dict(schedule) if isinstance(schedule, Mapping) and is_plain(dict(schedule)) else None,
        client_state={key: value for key, value in model.items() if key not in OWN_KEYS and is_plain(value)},
    )


def _stages_1_and_2(
    states: Sequence[Mapping[str, Any]], model: Mapping[str, Any]
) -> tuple[list[InTensor], dict[str, int]]:
    tensors, steps, stacks = list[InTensor](), dict[str, int](), Stacks()
    for index, shapes in enumerate(model["param_shapes"]):
        config = model.get("ds_config") or {}
        local: dict[str, set[int]] = {}  # the numbers of experts on a rank
        for stack, number in filter(None, map(stack_of, shapes)):
            local.setdefault(stack, set()).add(number)
        for place, ranks in enumerate(owners(shapes, states, index, config)):
            for fqn, shape in shapes.items():
                parts, step = _fragments(fqn, index, [states[rank] for rank in ranks])
                expert = stack_of(fqn)
                steps[fqn if expert is None else expert[0]] = step
                for kind, each in parts.items():
                    if expert is None:
                        tensors.append(_joined(fqn, kind, tuple(shape), each))
                    else:
                        number = place * len(local[expert[0]]) + expert[1]
                        stacks.add(expert[0], kind, number, tuple(shape), each)
    return [*tensors, *starmap(_joined, stacks.whole())], steps


def _fragments(fqn: str, index: int, states: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Tensor]], int]:
    """By kind, what ranks have of a parameter of group `index`, and how many updates it has had."""
    parts: dict[str, list[Tensor]] = {}
    step = 0
    for rank in states:
        fragment = rank["param_slice_mappings"][index].get(fqn)
        if fragment is None:
            continue
        numel, start = fragment.numel, fragment.start
        kept = rank["base_optimizer_state"]["state"][index]
        parts.setdefault(PARAM, []).append(rank["single_partition_of_fp32_groups"][index][start : start + numel])
        for kind in _STATES:
            if kind in kept:
                parts.setdefault(kind, []).append(kept[kind][start : start + numel])
        step = int(kept.get("step", 0))
    return parts, step


def _stage_3(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> tuple[list[InTensor], dict[str, int]]:
    kept = [rank["optimizer_state_dict"]["state"] for rank in states]
    groups = range(len(states[0]["fp32_flat_groups"]))
    flat = {PARAM: [_Sequence(rank["fp32_flat_groups"]) for rank in states]}
    for kind in _STATES:
        if kept[0] and kind in kept[0][0]:
            flat[kind] = [_Sequence([rank[index][kind] for index in groups]) for rank in kept]
    tensors, steps, at = list[InTensor](), dict[str, int](), 0
    for fqn, shape in [item for shapes in model["param_shapes"] for item in shapes.items()]:
        each = -(-prod(shape) // len(states))
        for kind, ranks in flat.items():
            parts = [part for rank in ranks for part in rank.cut(at, each)]
            tensors.append(_joined(fqn, kind, tuple(shape), parts))
        at += each
        steps[fqn] = int(kept[0][0].get("step", 0)) if kept[0] else 0
    return tensors, steps


class _Sequence:
    """Flat tensors one after the other, which are not joined."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def cut(self, start: int, numel: int) -> Iterator[Tensor]:
        """Elements [start, start + numel), as views."""
        for tensor in self._tensors:
            low, high = max(start, 0), min(start + numel, tensor.numel())
            if low < high:
                yield tensor.reshape(-1)[low:high]
            start -= tensor.numel()


def _universal(folder: Path, model: Mapping[str, Any]) -> tuple[list[InTensor], dict[str, int], Any, Any]:
    tensors, steps = list[InTensor](), dict[str, int]()
    shared, buffers = model.get("shared_params") or {}, model.get("buffer_names") or ()
    for place in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        fqn = place.name
        if fqn in shared or fqn in buffers:
            continue
        for kind, file in ((PARAM, "fp32.pt"), *((kind, f"{kind}.pt") for kind in _STATES)):
            if (place / file).is_file():
                tree = _loaded(place / file)
                tensor = tree["param"] if isinstance(tree, Mapping) else tree
                tensors.append(in_tensor(fqn, kind, tensor, place / file))
        if (place / "step.pt").is_file():
            steps[fqn] = int(_loaded(place / "step.pt"))
    common = folder / "zero" / "optimizer_state.pt"
    saved = _loaded(common) if common.is_file() else {}
    return tensors, steps, saved.get("param_groups"), saved.get("loss_scaler")


def _untrained(model: Mapping[str, Any], files: Sequence[Path], trained: set[str]) -> Iterator[InTensor]:
    """Buffers and frozen parameters."""
    buffers, shared = set(model.get("buffer_names") or ()), model.get("shared_params") or {}
    fragments = model.get("frozen_param_fragments") or {}
    shapes = model.get("frozen_param_shapes") or {}
    cut = len(files) > 1
    others = [_loaded(file).get("frozen_param_fragments") or {} for file in files[1:]] if cut and fragments else []
    for fqn, tensor in model["module"].items():
        if fqn in trained or fqn in shared or not isinstance(tensor, Tensor):
            continue
        if fqn in buffers:
            yield in_tensor(fqn, BUFFER, tensor, files[0])
        elif fqn in fragments and cut:
            yield _joined(
                fqn,
                PARAM,
                tuple(shapes[fqn]),
                [part[fqn].reshape(-1) for part in (model["frozen_param_fragments"], *others)],
            )
        else:
            yield in_tensor(fqn, PARAM, tensor, files[0])


def _other_experts(folder: Path, known: set[str]) -> Iterator[InTensor]:
    """Experts' parameters that no optimizer has, from files of their own."""
    stacks = Stacks()
    for file in sorted(file for file in folder.iterdir() if re.fullmatch(FILE, file.name)):
        for fqn, tensor in _loaded(file).items():
            expert = stack_of(fqn)
            if expert is not None and expert[0] not in known:
                stacks.add(expert[0], PARAM, expert[1], tuple(tensor.shape), [tensor.reshape(-1)])
    yield from starmap(_joined, stacks.whole())


def _joined(fqn: str, kind: str, shape: tuple[int, ...], parts: Sequence[Tensor]) -> InTensor:
    """The tensor of `shape` whose elements are those of `parts`, in order; more than it has fill up."""
    found = sum(part.numel() for part in parts)
    if found < prod(shape):
        raise CheckpointError(
            f"the checkpoint has {found} of {prod(shape)} elements of {fqn!r} ({kind})",
            cure="give the files of all ranks",
            value=fqn,
        )
    joined = _Sequence(parts)
    like = in_tensor(fqn, kind, parts[0], fqn)

    def read_elements(start: int, numel: int) -> bytes:
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in joined.cut(start, numel))

    return replace(like, shape=shape, read=read_elements)


def _hyperparameters(groups: Any) -> list[dict[str, Any]] | None:
    kept = [{key: group[key] for key in GROUP_KEYS if key in group} for group in groups or ()]
    return kept if kept and all(map(is_plain, kept)) else None


def _loss_scale(scaler: Any) -> dict[str, Any]:
    told = dict(vars(scaler)) if isinstance(scaler, StandIn) else {}
    if not told.get("dynamic"):
        return {}
    good = int(told.get("cur_iter", 0)) - int(told.get("last_overflow_iter", -1)) - 1
    tolerance = max(1, int(told.get("cur_hysteresis", 1)))
    return {"loss_scale": float(told["cur_scale"]), "good_steps": max(0, good), "tolerance": tolerance}


def _folder(source: Path) -> Path:
    if list(source.glob("*mp_rank_00_model_states.pt")):
        return source
    for name in ("latest", "latest_universal"):
        if (source / name).is_file():
            tag = (source / name).read_text(encoding="utf-8", errors="replace").strip()
            if tag and Path(tag).name == tag and (source / tag).is_dir():
                return source / tag
            raise CheckpointError(f"{source / name} names {tag!r:.100}, which is no folder there", value=tag)
    raise CheckpointError(
        f"{source} is no checkpoint of DeepSpeed: it has neither mp_rank_00_model_states.pt nor latest",
        cure="give the folder that DeepSpeed's save_checkpoint was given, or that of a tag",
        value=str(source),
    )


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    found = {file: re.fullmatch(pattern, file.name) for file in folder.iterdir()}
    return sorted(
        (file for file, match in found.items() if match), key=lambda file: int((found[file] or [0, 0])[1] or 0)
    )


def _loaded(file: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no checkpoint needs" if named else str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{file} is refused: {why}", cure="fetch it again", value=str(file)) from error


def _mapping(tree: Any, key: str, folder: Path) -> Mapping[str, Any]:
    found = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"the files of ranks in {folder} have no {key}", cure="fetch them again", value=key)
    return found
