"""The folder of a run and the settings that it keeps there, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from polyaccel.comm.default import default_communicator
from polyaccel.errors import PolyaccelError

SETTINGS_FILE = "settings.json"


def begin_run(
    folder: str, settings: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, resume: bool = False
) -> tuple[str, dict[str, Any]]:
    """Choose the folder of a run and keep its settings there, the same on all ranks. Collective.

    Args:
        folder: Where the run goes, for example `runs/gpt`. A new run goes to `runs/gpt-2`, `runs/gpt-3`, ... where
            earlier ones are. A resumed run is the one of these that was written last.
        settings: What makes the run what it is, as JSON; None where it is not given. A resumed run has the settings of
            its start, and one that is given must be equal.
        defaults: Settings of a new run where they are not given.
        resume: Continue a run, and make no new one.

    Returns:
        The folder, and the settings of the run.

    Raises:
        PolyaccelError: No run is there to resume, settings differ from those of its start, or the folder cannot be
            written. Every rank raises it.
    """
    ranks = default_communicator()
    answer: list[Any] = []
    if ranks.rank == 0:
        try:
            given = {name: value for name, value in settings.items() if value is not None}
            whole = {**settings, **(defaults or {}), **given}
            chosen = _resumed(Path(folder), given) if resume else _begun(Path(folder), whole)
            answer = [str(chosen[0]), chosen[1], ""]
        except PolyaccelError as error:
            answer = [error.message, None, error.hint]
        except (OSError, ValueError) as error:
            answer = [f"{folder} cannot be used: {error}", None, "name another folder"]
    text, kept, hint = ranks.broadcast_object(answer)
    if kept is None:
        raise PolyaccelError(text, hint=hint, value=folder)
    return text, kept


def _begun(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    free = next(name for name in names if not name.exists())
    free.mkdir(parents=True)
    (free / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return free, dict(settings)


def _resumed(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    candidates = [folder, *folder.parent.glob(f"{folder.name}-[0-9]*")]
    begun = [each for each in candidates if (each / SETTINGS_FILE).is_file()]
    if not begun:
        raise PolyaccelError(f"no run to resume: {folder}", hint="start one without resuming", value=str(folder))
    newest = max(begun, key=lambda each: max(file.stat().st_mtime for file in each.iterdir()))
    kept: dict[str, Any] = json.loads((newest / SETTINGS_FILE).read_text(encoding="utf-8"))
    other = {name: value for name, value in settings.items() if value != kept.get(name, value)}
    if other:
        shown = ", ".join(f"{name} {value} (it has {kept[name]})" for name, value in other.items())
        hint = "leave these out, or start a new run"
        raise PolyaccelError(f"a resumed run continues exactly and cannot change {shown}", hint=hint, value=other)
    return newest, kept
