"""The blobs of a save that every rank needs: rank 0's and its own, read together."""

from __future__ import annotations

from polyaccel.checkpoint.format.extents import Extent, ExtentTable, FileLocations
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.checkpoint.load.cooperative.reading import CooperativeReader
from polyaccel.checkpoint.load.cooperative.windows import MemoryGroups
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator

_NO_BOUND = 1 << 62


def read_blobs(
    communicator: Communicator,
    storage: Storage,
    folder: str,
    manifest: Manifest,
    locations: FileLocations,
    groups: MemoryGroups,
    step: str,
) -> dict[int, dict[str, bytes]]:
    """Read the blobs of rank 0 and of this rank, by rank. Collective; raises CheckpointError on every rank."""
    table = ExtentTable.of_blobs(manifest)
    if not table.extents:
        return {}
    ranks = sorted({rank for rank in (0, communicator.rank) if rank < manifest.world_size})
    extents = {rank: [(blob.name, Extent.of_blob(blob, rank)) for blob in manifest.blobs[rank]] for rank in ranks}
    with CooperativeReader(communicator, storage, folder, table, locations, groups, _NO_BOUND) as reading:
        for _, extent in (each for of_rank in extents.values() for each in of_rank):
            if extent.nbytes:
                reading.request(extent)
        reading.verify(step)
        found = {rank: dict[str, bytes]() for rank in ranks}

        def collect() -> None:
            for rank, of_rank in extents.items():
                for name, extent in of_rank:
                    found[rank][name] = bytes(reading.read(extent)) if extent.nbytes else b""

        reading.load(step, collect)
        return found
