"""The storage `node_local`: a directory on each host's own disk, where hosts share no file system."""

from __future__ import annotations

from polyaccel.checkpoint.storage.file import FileStorage


class NodeLocalStorage(FileStorage):
    """A directory that only the ranks of one host see: of the same name on every host, or of another.

    Each host has the files of its ranks and a copy of its neighbour's; see `polyaccel.checkpoint.save.per_node`.
    """

    name = "node_local"
    is_shared = False
