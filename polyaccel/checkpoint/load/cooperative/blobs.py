"""The blobs of a save that every rank needs: rank 0's, its own, and those that ranks saved for all, read together."""

from __future__ import annotations

from polyaccel.checkpoint.format.extents import Extent, ExtentTable, FileLocations
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.checkpoint.load.cooperative.reading import CooperativeReader
from polyaccel.checkpoint.load.cooperative.windows import MemoryGroups
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator

_NO_BOUND = 1 << 62
OWNED = "owned."
"""How the names of blobs begin that one rank saves for all ranks. Such names are unique over the ranks of a save."""


def read_blobs(
    communicator: Communicator,
    storage: Storage,
    folder: str,
    manifest: Manifest,
    locations: FileLocations,
    groups: MemoryGroups,
    step: str,
) -> tuple[dict[int, dict[str, bytes]], dict[str, bytes]]:
    """Read the blobs of rank 0 and of this rank, by rank, and those of `OWNED` by name. Collective; raises
    CheckpointError on every rank."""
    table = ExtentTable.of_blobs(manifest)
    if not table.extents:
        return {}, {}
    ranks = sorted({rank for rank in (0, communicator.rank) if rank < manifest.world_size})
    extents = [
        (rank, blob.name, Extent.of_blob(blob, rank))
        for rank, blobs in enumerate(manifest.blobs)
        for blob in blobs
        if rank in ranks or blob.name.startswith(OWNED)
    ]
    with CooperativeReader(communicator, storage, folder, table, locations, groups, _NO_BOUND) as reading:
        for _, _, extent in extents:
            if extent.nbytes:
                reading.request(extent)
        reading.verify(step)
        found, owned = {rank: dict[str, bytes]() for rank in ranks}, dict[str, bytes]()

        def collect() -> None:
            for rank, name, extent in extents:
                blob = bytes(reading.read(extent)) if extent.nbytes else b""
                if name.startswith(OWNED):
                    owned[name] = blob
                if rank in found:
                    found[rank][name] = blob

        reading.load(step, collect)
        return found, owned
