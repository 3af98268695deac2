"""Weights that other packages have quantised, in a form that every stage can hold."""

from __future__ import annotations

from torch import nn

from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.quantized.foreign import (
    bits_of,
    guard_four_bits,
    is_wrapped,
    restore,
    unguard_four_bits,
    unwrap,
)
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.zero.plan.policy import Placement


class QuantizedWeights(Rewrite):
    """Layers of bitsandbytes, and weights of torchao. See [Note: Quantised weights of other packages]."""

    name = "quantized"

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PolyaccelError for 8 bits of bitsandbytes at stage 3, and ShardingError for ranks with other
        scales."""
        wrapped: dict[str, nn.Module] = {}
        four_bits: dict[str, nn.Module] = {}
        checksums = {}
        for name, layer in context.model.named_modules():
            if is_wrapped(layer):
                wrapped[name] = layer
            elif (bits := bits_of(layer)) == 4:
                four_bits[name] = layer
                checksums[name] = guard_four_bits(layer, name)
            elif bits is not None and context.runtime.policy.params is Placement.SHARDED:
                raise PolyaccelError(
                    f"{name!r} is an 8-bit layer of bitsandbytes, which stage 3 cannot shard",
                    hint='use stage 2, load_in_4bit, or polyaccel.quantize_frozen(model, "int8")',
                    value=name,
                )
        for name, layer in wrapped.items():
            unwrap(layer, name)
        if checksums:
            _require_same(context, checksums)
        if not wrapped and not four_bits:
            return None

        def remove() -> None:
            for layer in four_bits.values():
                unguard_four_bits(layer)
            for layer in wrapped.values():
                restore(layer)

        return AppliedRewrite(name=self.name, modules=(*wrapped, *four_bits), remove=remove)


def _require_same(context: RewriteContext, checksums: dict[str, int]) -> None:
    """Raise ShardingError where ranks have other scales: those of the first one are not sent."""
    ranks = context.runtime.process_group_for(("data",)).all_gather_object(checksums)
    differing = [name for name in checksums if any(each.get(name) != checksums[name] for each in ranks)]
    if differing:
        raise ShardingError(
            f"the scales of {differing[0]!r} are not those of every rank",
            hint="load the same weights on every rank",
            value=differing,
        )
