"""Per-user directories and files that are safe in world-writable locations, for example /tmp.

[Note: Planted symbolic links]
In a folder that others share, such as the one for temporary files, they can make any name first: a link where our file
would be, which a write follows, or a folder of theirs, in which they exchange our files. So a folder counts only if it
is not a link, is this user's and no other user may write to it; and a file is made under a name that does not exist
yet, without following links, before it takes the place of an older one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def runtime_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for files of running jobs, in XDG_RUNTIME_DIR if private, else next to temporary files."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    if given and _is_own(Path(given), _OF_OTHERS):
        return Path(given, "polyaccel")
    return Path(tempfile.gettempdir(), f"polyaccel-{os.geteuid()}")


def cache_folder() -> Path:
    """Return the folder for what can be made again, in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "polyaccel"


def ensure_private_dir(path: Path) -> Path:
    """Make `path` if missing, for this user alone. Raises PermissionError for links and shared folders."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_own(path, _WRITTEN_BY_OTHERS):
        status = path.lstat()
        what = "is a link" if stat.S_ISLNK(status.st_mode) else f"has mode {stat.S_IMODE(status.st_mode):o}"
        reason = f"belongs to user {status.st_uid} and {what}: remove it, or name another folder"
        raise PermissionError(errno.EPERM, reason, str(path))
    path.chmod(0o700)
    return path


def atomic_write_private(path: Path, data: bytes) -> None:
    """Write a private file, whole or not at all, following no link."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _is_own(path: Path, forbidden: int) -> bool:
    """Whether this is a folder, no link to one, of this user, whose mode has none of the `forbidden` bits."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & forbidden
