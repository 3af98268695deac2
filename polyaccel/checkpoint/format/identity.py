"""The identity of a storage that not all ranks see: a file in it, in which ranks that share the files read the same."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

from polyaccel.checkpoint.parsing import json_object
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

NOTE = "place.json"
_ID = re.compile(r"[0-9a-f]{16}")
_MOST_NBYTES = 4096


def place_id(storage: Storage) -> str:
    """The identity of the place that `storage` is; empty where it has none."""
    found = read_note(storage).get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else ""


def read_note(storage: Storage) -> dict[str, Any]:
    """Return the file's content; nothing where it is missing or not ours."""
    nbytes = storage.size(NOTE)
    if nbytes is None:
        return {}
    try:
        return json_object(storage.read(NOTE, 0, min(nbytes, _MOST_NBYTES)), NOTE)
    except CheckpointError:  # no note of ours, which are whole
        return {}


def write_note(storage: Storage, identity: str, proof: str = "") -> None:
    """Give a storage an identity. `proof` is new each time that ranks want to see whether they see the same file."""
    note = {"id": identity, "host": socket.gethostname(), "proof": proof}
    storage.write(NOTE, [json.dumps(note).encode("ascii")])
