"""Object collectives: plain values as bytes, which a receiver never executes.

[Note: Pickle-free messages]
Every process that reaches a rank's port can send it bytes. A pickle is a program that its reader runs, so no backend
reads one: values are sent as `polyaccel.core.tagged_json`, and received bytes become a plain value or a CommError.
Users' own object collectives send other values only where ranks share a secret (`comm.api.objects`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from polyaccel.comm.composed import ComposedCollectives
from polyaccel.core import tagged_json
from polyaccel.errors import CommError

MOST_OBJECT_NBYTES = 1 << 30
"""Maximum length of a message of `all_gather_bytes`: memory is allocated by the length that a peer announces."""
_HEADER_NBYTES = 8
_FRAME_NBYTES = 2048  # most objects fit into one frame, which needs one collective instead of two


class ObjectCollectives(ComposedCollectives):
    """The part of a `Communicator` that sends values other than buffers. See [Note: Pickle-free messages]."""

    ranks: tuple[int, ...]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes of any length from every rank, in rank order. Collective; blocks.

        Every rank sends one frame: the length of its data and as much of it as fits. A second collective sends the rest
        where the longest needs one, which all ranks compute from the lengths.

        Args:
            data: Bytes of this rank, up to MOST_OBJECT_NBYTES.

        Returns:
            The bytes of each rank.

        Raises:
            CommError: The data of a rank is too long. Every rank raises it.
        """
        with self.inside(self.next_number()):
            room = _FRAME_NBYTES - _HEADER_NBYTES
            head = len(data).to_bytes(_HEADER_NBYTES, "little") + data[:room]
            frames = self._gather_frames(head, _FRAME_NBYTES)
            lengths = [int.from_bytes(frame[:_HEADER_NBYTES], "little") for frame in frames]
            bodies = [frame[_HEADER_NBYTES:] for frame in frames]
            longest = max(lengths)
            if longest > MOST_OBJECT_NBYTES:
                raise CommError(
                    f"rank {self.ranks[lengths.index(longest)]} brings an object of {longest} bytes, "
                    f"and {MOST_OBJECT_NBYTES} are the most",
                    hint="send large values as arrays: all_gather, broadcast",
                    value=longest,
                )
            if longest > room:
                tails = self._gather_frames(data[room:], longest - room)
                bodies = [body + tail for body, tail in zip(bodies, tails, strict=True)]
        return [body[:length] for body, length in zip(bodies, lengths, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a plain value from every rank, in rank order. Collective; blocks.

        Args:
            value: None, bool, int, float, str, bytes, or a list, tuple or dict with str keys of these. It is sent as
                `polyaccel.core.tagged_json`.

        Returns:
            The value of each rank.

        Raises:
            CommError: The value of this rank is not plain, or a received one cannot be read.
        """
        return [self._received(data, rank) for rank, data in enumerate(self._bytes_of_all(value))]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Send a plain value of one rank to all. Collective; blocks.

        Args:
            value: The value on `root`, plain as for `all_gather_object`; ignored elsewhere.
            root: Rank of this group that sends.

        Returns:
            The value of `root`.
        """
        return self._received(self._bytes_of_all(value if self.rank == root else None)[root], root)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Gather a plain value from every rank on one. Collective; blocks.

        Args:
            value: The value of this rank, plain as for `all_gather_object`.
            root: Rank of this group that receives.

        Returns:
            The values in rank order on `root`; None elsewhere.
        """
        sent = self._bytes_of_all(value)
        return [self._received(data, rank) for rank, data in enumerate(sent)] if self.rank == root else None

    def scatter_object(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Send each rank its element of one rank's values. Collective; blocks.

        Args:
            values: On `root` one plain value for each rank, as for `all_gather_object`; ignored elsewhere.
            root: Rank of this group that sends.

        Returns:
            Element `rank` of the values.
        """
        return self.broadcast_object(values, root)[self.rank]

    @abstractmethod
    def _gather_frames(self, data: bytes, nbytes: int) -> list[bytes]:
        """Every rank's `data`, each padded to `nbytes`."""

    def _bytes_of_all(self, value: Any) -> list[bytes]:
        try:
            data = tagged_json.to_bytes(value, "the object")
        except tagged_json.SerializationError as error:
            raise CommError(
                f"ranks exchange plain values only: {error.message}", hint=error.hint, value=error.value
            ) from error
        return self.all_gather_bytes(data)

    def _received(self, data: bytes, rank: int) -> Any:
        try:
            return tagged_json.from_bytes(data)
        except tagged_json.SerializationError as error:
            raise CommError(
                f"what rank {self.ranks[rank]} sent cannot be read: it holds {error.message}",
                hint="run the same version of polyaccel on every rank; a stranger may have sent this",
                value=error.value,
            ) from error
