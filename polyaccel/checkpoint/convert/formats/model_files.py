"""Which files of a folder are a model's, and which lie next to them.

Trainers and hubs keep other files of the same endings there: optimizers, schedules, settings, a second copy of the
weights under other names. An index names the model's files; else its name does, and a folder where several could be is
refused with their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyaccel.checkpoint.convert.importing import Incoming, LeftOut
from polyaccel.errors import CheckpointError

_NAMES = {
    ".safetensors": ("model", "diffusion_pytorch_model", "adapter_model", "consolidated"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model", "adapter_model"),
}
"""What a model's files are called, the more common first."""
_PARTS = re.compile(r"(.+)-(\d+)-of-(\d+)")
OPTIMIZERS, SCHEDULES = re.compile(r"optimizer(_\d+)?\.(pt|bin)"), re.compile(r"scheduler(_\d+)?\.(pt|bin)")
_NO_WEIGHTS = re.compile(
    r"(optimizer|scheduler|training_args|sampler|dl_state_dict|random_states|rng_state|scaler|ema)\w*\.\w+"
)
_STATES = (".pt", ".pth", ".pkl", ".bin", ".safetensors", ".ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model; the file of each tensor where an index names it, and the other files with states."""

    files: Sequence[Path]
    index: Mapping[str, str]
    other_files: Sequence[Path]

    def check(self, found: Mapping[Path, Collection[str]]) -> None:
        """Raise CheckpointError where the index names a tensor that its file, of those `found`, has not."""
        names = {file.name: set(members) for file, members in found.items()}
        missing = {tensor: name for tensor, name in self.index.items() if tensor not in names.get(Path(name).name, ())}
        if missing:
            what = ", ".join(f"{tensor!r} ({name})" for tensor, name in [*missing.items()][:8])
            raise CheckpointError(
                f"the index in {self.files[0].parent} names tensors that their files do not have: {what}",
                hint="fetch the files of one version of the model",
                value=sorted(missing),
            )

    def left_out(self) -> list[LeftOut]:
        """The other files, except for those of an optimizer and a schedule."""
        others = [file for file in self.other_files if not OPTIMIZERS.fullmatch(file.name)]
        return [LeftOut(each.name, "not the model") for each in others if not SCHEDULES.fullmatch(each.name)]


def find_files(source: Path, suffix: str) -> ModelFiles:
    """Return the files of the model at `source`, a file or a folder."""
    if source.is_file():
        return ModelFiles([source], {}, [])
    present = sorted(file for file in source.glob("*") if file.is_file())
    indexes = [source / f"{stem}{suffix}.index.json" for stem in _NAMES[suffix]]
    indexes += sorted({file for file in present if file.name.endswith(f"{suffix}.index.json")} - {*indexes})
    index = next((each for each in indexes if each.is_file()), None)
    places = {} if index is None else _weight_map(index)
    if index is not None:
        files = [source / Path(name).name for name in sorted(set(places.values()))]
    else:
        files = _by_name(source, [file for file in present if file.name.endswith(suffix)], suffix)
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing[:8])}" if missing else f"holds no *{suffix} file"
        raise CheckpointError(f"{source} {what}", hint="give the folder of a whole model", value=str(source))
    return ModelFiles(files, places, [each for each in present if each not in files and each.suffix in _STATES])


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return {str(tensor): str(name) for tensor, name in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of files: {error!r}", value=str(index)) from error


def _by_name(source: Path, files: Sequence[Path], suffix: str) -> list[Path]:
    """The files of one model among those with its ending."""
    files = [file for file in files if not _NO_WEIGHTS.fullmatch(file.name)]
    sets: dict[str, list[Path]] = {}
    for file in files:
        stem = file.name.removesuffix(suffix)
        parts = _PARTS.fullmatch(stem)
        sets.setdefault(parts[1] if parts else stem, []).append(file)
    name = next((each for each in _NAMES[suffix] if each in sets), None)
    if name is None and len(sets) > 1:
        raise CheckpointError(
            f"{source} holds several files that could be the model: {', '.join(file.name for file in files[:8])}",
            hint="give the file of the model",
            value=[file.name for file in files],
        )
    found = sets.get(name or next(iter(sets), ""), [])
    numbers = [_PARTS.fullmatch(file.name.removesuffix(suffix)) for file in found]
    counts = {int(each[3]) for each in numbers if each is not None}
    if counts and counts != {len(found)}:
        raise CheckpointError(
            f"{source} has {len(found)} of {max(counts)} files of {name or found[0].name}",
            hint="fetch the others",
            value=len(found),
        )
    return found


def with_states(incoming: Incoming, files: ModelFiles) -> Incoming:
    """Add the states that lie next to the model's files; leave out what cannot be taken over."""
    incoming = replace(incoming, left_out=[*incoming.left_out, *files.left_out()])
    optimizers = [file for file in files.other_files if OPTIMIZERS.fullmatch(file.name)]
    schedules = [file for file in files.other_files if SCHEDULES.fullmatch(file.name)]
    step = _step(files.files[0].parent / "trainer_state.json")
    if step:
        incoming = replace(incoming, counters={"global_steps": step, "micro_steps": step})
    if not optimizers and not schedules:
        return incoming
    from polyaccel.checkpoint.convert.formats.torch_files import load_tree, optimizer_from, with_schedule

    if schedule := _only(schedules):
        incoming = with_schedule(incoming, load_tree(schedule), str(schedule))
    several = [LeftOut(each.name, "one of several") for found in (optimizers, schedules) for each in found[1:]]
    several += [LeftOut(found[0].name, "one of several", True) for found in (optimizers, schedules) if len(found) > 1]
    incoming = replace(incoming, left_out=[*incoming.left_out, *several])
    if optimizer := _only(optimizers):
        return optimizer_from(load_tree(optimizer), str(optimizer)).joined(incoming, steps=step)
    return incoming


def _only(files: Sequence[Path]) -> Path | None:
    return files[0] if len(files) == 1 else None


def _step(file: Path) -> int:
    """The steps that the Trainer counted; 0 without its file."""
    try:
        found: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return 0
    step = found.get("global_step") if isinstance(found, dict) else None
    return step if isinstance(step, int) and step > 0 else 0
