"""Checkpoints of other tools, recognised by the names of their files: what a folder is, and the command that imports
it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

_FILES: tuple[tuple[str, str, str], ...] = (
    (r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*_optim_states\.pt", "DeepSpeed", "deepspeed"),
    (r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt", "orbax", "orbax"),
    (r"optimizer\.pt|trainer_state\.json", "transformers' Trainer", ""),
    (r"random_states_\d+\.pkl|optimizer\.bin", "Accelerate", ""),
    (r"(?!rank\d+\.).*\.safetensors(\.index\.json)?", "safetensors", "safetensors"),
    (r".*\.msgpack|flax_model.*", "flax", "flax"),
    (r".*\.eqx", "equinox", "equinox"),
    (r".*\.ckpt", "Lightning", "bin"),
    (r".*\.(bin|pt|pth)", "torch", "bin"),
)
"""Names of files, whose they are, and the format that imports them; without one, the format of the weights there. The
first that fits counts."""
_ORBAX_ITEMS = ("default", "state", "params", "items")


@dataclass(frozen=True, slots=True)
class Recognised:
    """A file or folder of another tool: `tool` wrote it, and `format_name` is what `ckpt import --from` calls it."""

    place: str
    tool: str
    format_name: str

    @property
    def hint(self) -> str:
        """The command that makes one of ours of it."""
        if self.tool == "equinox":  # its files have arrays without names
            return "read it with equinox.tree_deserialise_leaves(file, model), and give polyaccel.initialize the model"
        return f"polyaccel ckpt import {self.place} NEW_DIR --from {self.format_name}, and load NEW_DIR"

    def error(self) -> CheckpointError:
        """What to raise where one of ours was asked for."""
        return CheckpointError(f"{self.place} is a checkpoint of {self.tool}", hint=self.hint, value=self.place)


def recognise(storage: Storage, path: str = "") -> Recognised | None:
    """The tool that wrote the folder at `path`; None where no file has a known name."""
    place = f"{storage.location.rstrip('/')}/{path}" if path else storage.location
    below = f"{path}/" if path else ""
    if storage.size(f"{below}.metadata") is not None:
        return Recognised(place, "torch.distributed.checkpoint", "dcp")
    found = recognise_names(place, storage.names(path))
    if found is not None:
        return found
    for name in storage.names(path):
        inside = storage.names(f"{below}{name}") if storage.size(f"{below}{name}") is None else ()
        within = recognise_names(place, inside)
        is_item = name in _ORBAX_ITEMS or name.isdecimal()
        if within is not None and (within.tool == "DeepSpeed" or (within.tool == "orbax" and is_item)):
            return within
        if storage.size(f"{below}{name}/.metadata") is not None:
            return Recognised(f"{place}/{name}", "torch.distributed.checkpoint", "dcp")
        if within is None and name.isdecimal() and any(item in _ORBAX_ITEMS for item in inside):
            return Recognised(place, "orbax", "orbax")
    return None


def recognise_file(storage: Storage) -> Recognised | None:
    """The tool that wrote the file that a storage was given in place of a folder; None for a folder."""
    path = Path(storage.location)
    return recognise_names(storage.location, (path.name,)) if path.is_file() else None


def recognise_names(place: str, names: tuple[str, ...]) -> Recognised | None:
    """The tool whose files have these `names`."""
    for pattern, tool, format_name in _FILES:
        if any(re.fullmatch(pattern, name) for name in names):
            weights = "safetensors" if any(name.endswith(".safetensors") for name in names) else "bin"
            return Recognised(place, tool, format_name or weights)
    return None
