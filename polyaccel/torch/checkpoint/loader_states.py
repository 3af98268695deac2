"""The position of a loader of training data in a checkpoint: one for all ranks, or one of each rank.

The engine's own loaders say `state_is_shared`: they have one state for all ranks, which any number of ranks continues
from. A loader of the script's own with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has them,
has a state on each rank, which as many ranks continue from, unless it says so too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.core.tagged_json import is_serializable
from polyaccel.errors import CheckpointError
from polyaccel.torch.data import is_stateful

_BLOB, _RANKS, _SHARED = "data", "loader_of_each_rank", "loader_of_all_ranks"
_WHAT = "the state of the loader of training data"


class _Saved(Protocol):
    """A checkpoint."""

    @property
    def tag(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def rank_blobs(self, rank: int) -> dict[str, bytes]: ...


def loader_state(loader: Any, ranks: int) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """Return the plain values and the bytes of this rank that hold the position of `loader`, of `ranks` ranks."""
    if not is_stateful(loader):
        return None, {}
    state = loader.state_dict()
    if _is_shared(loader) and is_serializable(state):
        return state, {}
    return {_SHARED if _is_shared(loader) else _RANKS: ranks}, {_BLOB: packed(state, _WHAT)}


def saved_loader_state(loader: Any, saved: _Saved, values: Mapping[str, Any] | None, rank: int, ranks: int) -> Any:
    """Return what `loader.load_state_dict` takes on this rank of `ranks`; None where nothing is to be loaded.

    Raises CheckpointError where the state is of another kind of loader, or of other ranks.
    """
    if not is_stateful(loader) or values is None:
        return None
    if (_RANKS in values) == _is_shared(loader):
        raise CheckpointError(
            f"checkpoint {saved.tag!r} has the position of another kind of loader than {type(loader).__name__}",
            hint="give initialize the training_data of the run that saved, or none",
            value=type(loader).__name__,
        )
    if _SHARED in values:
        return unpacked(saved.rank_blobs(0)[_BLOB], _WHAT)
    if _RANKS not in values:
        return values
    if saved.world_size != ranks:
        raise CheckpointError(
            f"each of {saved.world_size} ranks saved the state of its own loader, and this is a run of {ranks}",
            hint="resume with as many ranks; datasets by number and polyaccel.data.WholeStream continue on any number",
            value=ranks,
        )
    return unpacked(saved.rank_blobs(rank)[_BLOB], _WHAT)


def _is_shared(loader: Any) -> bool:
    return bool(getattr(loader, "state_is_shared", False))
