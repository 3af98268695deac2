"""polyaccel's checkpoints as universal ones of DeepSpeed 0.19.8, which any number of ranks at ZeRO 1 to 3 loads with
`"checkpoint": {"load_universal": true}`.

`polyaccel ckpt export DIR OUT --format deepspeed-universal` finds this by the entry point of the package. Nothing of
DeepSpeed has to be installed.

[Note: Universal checkpoint contents]
A parameter's folder has its weight in full precision and its optimizer states, a file each; `optimizer_state.pt` has
what all share: the groups' hyperparameters and the loss scale, for stages 1 and 2 at its top and for stage 3 below
`optimizer_state_dict`. Stage 3 gives the first group's hyperparameters to all groups: there stand those alone in which
the groups agree, so that the others stay the config's. It also gives all groups one counter of updates, which each of
them moves: with torch's Adam and several groups the steps that follow are off, as from its own checkpoints. It reads
neither frozen parameters nor buffers of a universal checkpoint, and keeps those that the model was built with. They are
written all the same, for other readers, and so are the other names of tied parameters: DeepSpeed's converter writes
weights of both after stages 1 and 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.exporting import BUFFER, ExportTensor, Progress
from polyaccel.checkpoint.convert.formats.torch_bin import on_disk
from polyaccel.checkpoint.format.commit import check_tag
from polyaccel.checkpoint.format.torch_values import unpacked
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError
from polyaccel.torch.checkpoint.contents import CLIENT_SCHEDULE
from polyaccel.torch.checkpoint.load import client_state_of
from polyaccel_deepspeed.exchange.importing import GROUP_KEYS, OWN_KEYS
from polyaccel_deepspeed.exchange.states import PARAM
from polyaccel_deepspeed.keys.checkpoint_constants import UNIVERSAL_CHECKPOINT_INFO
from polyaccel_deepspeed.version import __version__

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def write(out: Path, reader: CheckpointReader, tensors: Sequence[ExportTensor], progress: Progress) -> list[str]:
    """Write the checkpoint below `out`, one tensor at a time, and `latest_universal` last. Returns the names of what
    lies directly in `out`.

    Raises CheckpointError for damage, for experts, and where parameters have had different numbers of updates, for
    DeepSpeed counts one a group.
    """
    if stacks := [tensor.name for tensor in tensors if ".deepspeed_moe.experts." in tensor.name]:
        raise CheckpointError(
            f"{stacks[0]} has experts of DeepSpeed's MoE, which universal checkpoints cannot distinguish: every rank "
            "there calls its first expert 0",
            hint="export the weights with --format safetensors",
            value=stacks[:8],
        )
    folder = out / check_tag(reader.tag)
    steps = {fqn: int(count) for fqn, count in reader.scalars.get("param_steps", {}).items()}
    trained = {tensor.name for tensor in tensors if tensor.tensor.kind == PARAM} & steps.keys()
    counts = sorted({steps[fqn] for fqn in trained})
    if len(counts) > 1:
        fewest = [fqn for fqn in sorted(trained) if steps[fqn] == counts[0]]
        raise CheckpointError(
            f"parameters of {reader.tag!r} have had {counts} updates, and DeepSpeed counts one number a group: "
            f"{', '.join(fewest[:8])} have had {counts[0]}",
            hint="give --kind param to export the weights alone",
            value=counts,
        )
    tied = dict(reader.scalars.get("tied_weights") or {})
    others = {first: [name for name in tied if tied[name] == first] for first in tied.values()}
    has_states = any(tensor.tensor.kind not in (PARAM, BUFFER) for tensor in tensors)
    for tensor in tensors:
        if tensor.tensor.kind == BUFFER:
            continue
        place = folder / "zero" / tensor.name
        place.mkdir(parents=True, exist_ok=True)
        kind = "fp32" if tensor.tensor.kind == PARAM else tensor.tensor.kind
        with on_disk(out, [tensor], progress) as found:
            value = found[tensor]
            wide = value.float() if kind == "fp32" and value.is_floating_point() else value
            torch.save({"param": wide, "cat_dim": 0}, place / f"{kind}.pt")
            if kind == "fp32":
                for name in others.get(tensor.name, ()):
                    _save_weight(folder, name, wide)
        if kind == "fp32" and has_states and tensor.name in trained:
            torch.save(torch.tensor(float(steps[tensor.name])), place / "step.pt")
    (folder / "zero").mkdir(parents=True, exist_ok=True)
    _save(_common(reader, counts[0] if counts else 0), folder / "zero" / "optimizer_state.pt")
    buffers = [tensor for tensor in tensors if tensor.tensor.kind == BUFFER]
    with on_disk(out, buffers, progress) as found:
        module = {tensor.name: found[tensor] for tensor in buffers}
        for name, value in module.items():
            _save_weight(folder, name, value)
        shapes = {
            tensor.name: torch.Size(tensor.shape)
            for tensor in tensors
            if tensor.tensor.kind == PARAM and tensor.name in trained
        }
        states = _model_states(reader, module, shapes) | {"shared_params": tied}
        for name in (
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        ):  # stage 3 asks for that
            torch.save(states, folder / name)
    FileStorage(out).write("latest_universal", [reader.tag.encode()])
    return [reader.tag, "latest_universal"]


def _save_weight(folder: Path, name: str, value: torch.Tensor) -> None:
    """Write a tensor that no optimizer has."""
    place = folder / "zero" / name
    place.mkdir(parents=True, exist_ok=True)
    torch.save({"param": value.float() if value.is_floating_point() else value.clone()}, place / "fp32.pt")


def _model_states(
    reader: CheckpointReader, module: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    counters = reader.scalars.get("counters", {})
    client_state = client_state_of(reader)
    if taken := sorted(client_state.keys() & OWN_KEYS - {UNIVERSAL_CHECKPOINT_INFO}):  # that one scripts give
        raise CheckpointError(
            f"the client state has {', '.join(taken)}, and DeepSpeed keeps its own values under these names there",
            hint="save the run under other names",
            value=taken,
        )
    return {
        **client_state,
        "module": dict(module),
        "buffer_names": list(module),
        "optimizer": None,
        "param_shapes": [dict(shapes)],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "lr_scheduler": _schedule(reader),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": counters.get("global_steps", 0),
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": reader.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": reader.about.get("config", {}),
        "ds_version": __version__,
    }


def _schedule(reader: CheckpointReader) -> Any:
    """The state of the schedule, of the config or of a client; None without one."""
    data = reader.rank_blobs(0).get(CLIENT_SCHEDULE)
    state = reader.scalars.get("lr_scheduler")
    return state if data is None else unpacked(data, "the state of the learning-rate schedule")


def _common(reader: CheckpointReader, steps: int) -> dict[str, Any]:
    """What all parameters share. See [Note: Universal checkpoint contents]."""
    saved = reader.scalars.get("optimizer")
    groups = [
        {key: _value(key, group[key]) for key in GROUP_KEYS if key in group}
        for group in (saved or {}).get("param_groups", ())
    ]
    equal = {
        key: value for key, value in (groups[0] if groups else {}).items() if all(g.get(key) == value for g in groups)
    }
    common: dict[str, Any] = {
        "ds_version": __version__,
        "overflow": False,
        "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)],
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(float(steps))}},
            "param_groups": [{**equal, "params": [0]}],
        },
    }
    if scaler := _scaler(reader):
        common |= {"loss_scaler": scaler, "dynamic_loss_scale": True}
    return common


def _value(key: str, value: Any) -> Any:
    return tuple(value) if key == "betas" else value


class _Scaler:
    """A dynamic loss scale, pickled as an object of DeepSpeed's class with these attributes."""


_Scaler.__module__, _Scaler.__qualname__, _Scaler.__name__ = _SCALERS, "DynamicLossScaler", "DynamicLossScaler"


def _scaler(reader: CheckpointReader) -> _Scaler | None:
    """The dynamic loss scale of a run in float16, with the numbers of its config; None for any other run."""
    config = reader.about.get("config") or {}
    fp16, now = config.get("fp16") or {}, reader.scalars.get("loss_scaler") or {}
    if fp16.get("enabled") is not True or fp16.get("loss_scale") or "loss_scale" not in now:
        return None
    scaler = _Scaler()
    vars(scaler).update(
        cur_scale=float(now["loss_scale"]),
        dynamic=True,
        cur_iter=int(now["good_steps"]),
        last_overflow_iter=-1,
        scale_factor=2.0,
        scale_window=fp16.get("loss_scale_window", 1000),
        min_scale=fp16.get("min_loss_scale", 1.0),
        delayed_shift=fp16.get("hysteresis", 2),
        cur_hysteresis=int(now["tolerance"]),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    return scaler


def _save(tree: dict[str, Any], path: Path) -> None:
    with _pickled_by_name():
        torch.save(tree, path)


@contextmanager
def _pickled_by_name() -> Iterator[None]:
    """Inside, pickle takes `_Scaler` for the class of its name."""
    had, ours = sys.modules.get(_SCALERS), ModuleType(_SCALERS)
    vars(ours)[_Scaler.__name__] = _Scaler
    sys.modules[_SCALERS] = ours
    try:
        yield
    finally:
        if had is None:
            del sys.modules[_SCALERS]
        else:
            sys.modules[_SCALERS] = had
