"""What a rank hands to the process that writes for it, and the answers: JSON next to file descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from polyaccel.checkpoint.format.pieces import FileLayout, FileSegment, PieceSpec
from polyaccel.checkpoint.retention import KEEP_ALL, Retention
from polyaccel.core import tagged_json
from polyaccel.core.block import Block
from polyaccel.core.types import DType
from polyaccel.job.memory_server.protocol import exactly

GIVE_UP, LAST = b"G", b"L"
"""Messages of the rank: this save is not waited for any more; the outcome of other ranks' parts will not be
reported."""
_LENGTH_NBYTES = 8
_PLAIN = ("scalars", "about", "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One rank's part of a save.

    `storage`, `location` and `options` identify the storage, `folder` where in it; `name`, `nbytes`, `header` and
    `segments` lay the file out. Rank 0 commits, with its `scalars` and `about`.
    """

    rank: int
    world_size: int
    storage: str
    location: str
    options: Mapping[str, Any]
    tag: str
    folder: str
    name: str
    nbytes: int
    header: str
    segments: Sequence[Any]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    save_latest: bool = True
    retention: Retention = KEEP_ALL

    def layout(self) -> FileLayout:
        """The layout of the file."""
        header = self.header.encode("latin-1")
        return FileLayout(self.name, header, tuple(_segment(*segment) for segment in self.segments), self.nbytes)

    def to_bytes(self) -> bytes:
        """The job as JSON."""
        tree = asdict(self)
        return json.dumps(tree | {key: tagged_json.encode(tree[key], key) for key in _PLAIN}).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveJob:
        """The inverse of `to_bytes`."""
        tree = json.loads(data)
        plain_values = {key: tagged_json.decode(tree[key]) for key in _PLAIN}
        return cls(**tree | plain_values | {"retention": Retention.from_tree(tree["retention"])})


def segments_of(layout: FileLayout) -> list[Any]:
    """The segments of a layout as a job has them."""
    return [[segment.offset, segment.nbytes, _content(segment.content)] for segment in layout.segments]


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message with open files."""
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH_NBYTES, "little")], list(descriptors))
    connection.sendall(data)


def receive(connection: socket.socket, descriptors: int = 0) -> tuple[bytes, list[int]] | None:
    """A message and up to so many open files; None when the other side has ended."""
    head, found, *_ = socket.recv_fds(connection, _LENGTH_NBYTES, descriptors)
    if not head:
        return None
    head += exactly(connection, _LENGTH_NBYTES - len(head))
    return exactly(connection, int.from_bytes(head, "little")), list(found)


def _content(content: PieceSpec | str) -> Any:
    if isinstance(content, str):
        return content
    runs = None if content.block is None else content.block.runs
    return [content.fqn, content.kind, content.shape, content.dtype.value, content.start, content.length, runs]


def _segment(offset: int, nbytes: int, content: Any) -> FileSegment:
    if isinstance(content, str):
        return FileSegment(offset, nbytes, content)
    fqn, kind, shape, dtype, start, length, runs = content
    shape = tuple(shape)
    block = None if runs is None else Block(shape, tuple(tuple((at, n) for at, n in of_dim) for of_dim in runs))
    return FileSegment(offset, nbytes, PieceSpec(fqn, kind, shape, DType(dtype), start, length, block))
