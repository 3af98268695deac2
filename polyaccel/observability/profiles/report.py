"""A profile where its reader wants it: in the log or a file, and as a picture in the run's folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

from polyaccel.observability.profiles.flame import flame_svg
from polyaccel.observability.profiles.table import TableStyle, profile_table
from polyaccel.observability.profiles.tree import ProfileNode

log = getLogger(__name__)
FLAME_FILE = "flops_profile.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The optimizer step that is profiled, from 1, and what becomes of its profile: the table goes to `output_file`
    (None: the log), the picture to `folder` (None: that of `output_file`, or nowhere)."""

    step: int
    style: TableStyle = field(default_factory=TableStyle)
    output_file: str | None = None
    folder: str | None = None


def report_profile(root: ProfileNode, title: str, settings: ProfileSettings) -> None:
    """Write a profile; a file that cannot be written is a line in the log, for training continues."""
    table = profile_table(root, title, settings.style)
    picture = None
    if settings.folder is not None:
        picture = Path(settings.folder, FLAME_FILE)
    elif settings.output_file is not None:
        picture = Path(settings.output_file).with_suffix(".svg")
    try:
        if settings.output_file is not None:
            Path(settings.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(settings.output_file).write_text(table + "\n", encoding="utf-8")
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(flame_svg(root, title), encoding="utf-8")
    except OSError as error:
        log.warning("the profile could not be written: %s", error)
    if settings.output_file is None:
        log.info("%s%s", table, f"\n  picture: {picture}" if picture else "")
    else:
        log.info("%s: see %s", title, settings.output_file)
