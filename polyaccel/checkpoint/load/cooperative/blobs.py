"""The blobs of a save that every rank needs: rank 0's, its own, and those that ranks saved for all, read together."""

from __future__ import annotations

from collections.abc import Callable

from polyaccel.checkpoint.format.extents import Extent, ExtentTable, FileLocations
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.checkpoint.load.cooperative.reading import CooperativeReader
from polyaccel.checkpoint.load.cooperative.windows import MemoryGroups
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

_NO_BOUND = 1 << 62
OWNED = "owned."
"""How the names of blobs begin that one rank saves for all ranks. Such names are unique over the ranks of a save."""
OWNED_STATES = f"{OWNED}client_optimizer."
"""How the names of those begin that have optimizer states of whole parameters, packed as `{"states": {parameter: {name:
value}}}`."""


class SavedBlobs:
    """The blobs of a save. `read_alone` reads an extent by this rank alone."""

    def __init__(self, manifest: Manifest, read_alone: Callable[[Extent], bytes]) -> None:
        self._manifest, self._read_alone = manifest, read_alone
        self._of_ranks: dict[int, dict[str, bytes]] = {}
        """Those of some ranks, already read."""
        self._owned: dict[str, bytes] | None = None
        """Those of `OWNED`, once they are read."""

    def of_rank(self, rank: int) -> dict[str, bytes]:
        """Return what `rank` saved, by name. Raises CheckpointError for a rank that was not there."""
        ranks = self._manifest.world_size
        if not 0 <= rank < ranks:
            raise CheckpointError(
                f"{self._manifest.tag!r} was saved by {ranks} ranks and has no blobs of rank {rank}",
                hint="compare with `world_size` first: states such as random numbers do not carry over to more ranks",
                value=rank,
            )
        if rank in self._of_ranks:
            return dict(self._of_ranks[rank])
        return {blob.name: self._read_alone(Extent.of_blob(blob, rank)) for blob in self._manifest.blobs[rank]}

    def owned(self) -> dict[str, bytes]:
        """Return those of `OWNED` of all ranks, by name."""
        if self._owned is not None:
            return dict(self._owned)
        return {
            blob.name: self._read_alone(Extent.of_blob(blob, rank))
            for rank, blobs in enumerate(self._manifest.blobs)
            for blob in blobs
            if blob.name.startswith(OWNED)
        }

    def read_together(
        self,
        communicator: Communicator,
        storage: Storage,
        folder: str,
        locations: FileLocations,
        groups: MemoryGroups,
        step: str,
    ) -> None:
        """Read the blobs of rank 0 and of this rank, and those of `OWNED`. Collective; raises CheckpointError on every
        rank."""
        manifest = self._manifest
        found, owned = dict[int, dict[str, bytes]](), dict[str, bytes]()
        table = ExtentTable.of_blobs(manifest)
        if not table.extents:
            return
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
            found |= {rank: {} for rank in ranks}

            def collect() -> None:
                for rank, name, extent in extents:
                    blob = bytes(reading.read(extent)) if extent.nbytes else b""
                    if name.startswith(OWNED):
                        owned[name] = blob
                    if rank in found:
                        found[rank][name] = blob

            reading.load(step, collect)
        self._of_ranks |= found
        self._owned = owned
