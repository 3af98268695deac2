"""The frontend of a ZeRO engine, as the engine's parameters see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from polyaccel.core.buffer import Buffer
from polyaccel.zero.plan.layout import Bucket


class ParamListener(ABC):
    """The frontend that parameters come from: it has their first values, and sees them wherever they move."""

    @abstractmethod
    def read_param(self, fqn: str) -> Buffer:
        """The parameter's present value, flat, in the precision that the model was built with."""

    def on_bound(self, fqn: str, view: Buffer) -> None:  # noqa: B027 - an owner that does not look needs no notice
        """The parameter stands in `view` from now on."""

    def on_freed(self, fqn: str) -> None:  # noqa: B027 - likewise
        """The parameter is sharded now and stands nowhere as a whole."""

    def show(self, bucket: Bucket, views: Sequence[Buffer]) -> None:
        """The parameters of a bucket stand in `views` from now on."""
        for slot, view in zip(bucket.slots, views, strict=True):
            self.on_bound(slot.param.fqn, view)

    def hide(self, bucket: Bucket) -> None:
        """The parameters of a bucket are sharded now."""
        for slot in bucket.slots:
            self.on_freed(slot.param.fqn)

    def changed_params(self) -> Collection[str]:
        """The whole parameters that users of this rank may have written to since their values were last adopted."""
        return ()

    def on_adopted(self, names: Collection[str]) -> None:  # noqa: B027 - an owner without users needs no notice
        """The values of these parameters are known again."""

    def divergence_hint(self, fqn: str) -> str:
        """What to do where the ranks' users gave a parameter different values."""
        return (
            "change it in the same way on all ranks, or on one of them inside "
            "`with polyaccel.zero.GatheredParameters([...], modifier_rank=0)`, which all enter"
        )
