"""A rank's part of a replica: the file of its pieces in memory, and the note next to it with what the file holds.

The keys of a keeper's entries: `parts/ENGINE/ATTEMPT/STEP-WORLD/RANK` has a part, `begun/ENGINE/ATTEMPT/RANK` the step
that a rank has finished last, copied or not, and `files/ENGINE/...` a checkpoint made of parts. ENGINE distinguishes a
job's engines, by their first rank and a number, ATTEMPT its starts.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.checkpoint.format.manifest import BlobEntry
from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.parsing import json_object
from polyaccel.errors import CheckpointError

_PART = re.compile(r"parts/([\d.]+)/([\w-]+)/(\d{12})-(\d{6})/(\d{6})")


@dataclass(frozen=True, slots=True, order=True)
class PartKey:
    """Where a keeper has a rank's part."""

    step: int
    attempt: str
    engine: str
    world_size: int
    rank: int

    def __str__(self) -> str:
        return f"{parts_of(self.engine)}{self.attempt}/{self.step:012d}-{self.world_size:06d}/{self.rank:06d}"

    @classmethod
    def parse(cls, key: str) -> PartKey | None:
        """The inverse of `str`; None for any other key."""
        found = _PART.fullmatch(key)
        return None if found is None else cls(int(found[3]), found[2], found[1], int(found[4]), int(found[5]))


def parts_of(engine: str) -> str:
    """The folder of an engine's parts."""
    return f"parts/{engine}/"


def begun_of(engine: str) -> str:
    """The folder of the steps that ranks of an engine have finished."""
    return f"begun/{engine}/"


def files_of(engine: str) -> str:
    """The folder of the checkpoint that an engine's parts were made into, without a slash."""
    return f"files/{engine}"


@dataclass(frozen=True)
class PartNote:
    """What a part holds. `file` is its image, `blobs` are the rank's own bytes; `scalars` and `about` are rank 0's, as
    `encode_plain` gives them. `saved_at_s` is seconds since 1970 by the rank's clock."""

    step: int
    saved_at_s: float
    file: RankFile
    blobs: Mapping[str, bytes]
    scalars: Any
    about: Any

    def to_bytes(self) -> bytes:
        """A line of JSON and a line with its checksum."""
        tree = {
            "step": self.step,
            "saved_at_s": self.saved_at_s,
            "file": self.file.to_tree(),
            "blobs": {name: base64.b64encode(blob).decode("ascii") for name, blob in self.blobs.items()},
            "scalars": self.scalars,
            "about": self.about,
        }
        body = json.dumps(tree, separators=(",", ":")).encode("ascii")
        return body + b"\n%08x\n" % zlib.crc32(body)

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> PartNote:
        """The inverse of `to_bytes`. Raises CheckpointError, naming `what`, for anything else."""
        body, _, rest = data.partition(b"\n")
        if rest != b"%08x\n" % zlib.crc32(body):
            raise CheckpointError(f"the note of {what} is damaged: its checksum is wrong", value=what)
        tree = json_object(body, what)
        try:
            return cls(
                int(tree["step"]),
                float(tree["saved_at_s"]),
                RankFile.from_tree(tree["file"], what),
                {str(name): base64.b64decode(blob, validate=True) for name, blob in tree["blobs"].items()},
                tree["scalars"],
                tree["about"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the note of {what} is none: {type(error).__name__}: {error}", value=what) from error

    def blob_entries(self, file: str) -> tuple[Sequence[BlobEntry], bytes]:
        """The blobs one after the other, as a file of that name has them."""
        entries, at = list[BlobEntry](), 0
        for name, blob in self.blobs.items():
            entries.append(BlobEntry(name, file, at, len(blob), zlib.crc32(blob)))
            at += len(blob)
        return entries, b"".join(self.blobs.values())
