"""Weights that other packages have quantised, in a form that every stage can hold."""

from __future__ import annotations

from torch import nn

from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.quantized.foreign import (
    bits_of,
    guard,
    is_trained_in_eight_bits,
    is_wrapped,
    restore,
    unguard,
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
        """Raises PolyaccelError for weights that cannot be trained over, and ShardingError for ranks with other
        scales."""
        wrapped: dict[str, nn.Module] = {}
        guarded: dict[str, nn.Module] = {}
        checksums = {}
        for name, layer in context.model.named_modules():
            if is_wrapped(layer):
                wrapped[name] = layer
            elif is_trained_in_eight_bits(layer):
                if context.runtime.policy.params is Placement.SHARDED:
                    hint = "build it with has_fp16_weights=False as load_in_8bit does, or use stage 2"
                    raise PolyaccelError(
                        f"stage 3 cannot shard {name!r}, which rounds its weight", hint=hint, value=name
                    )
            elif bits_of(layer) is not None:
                guarded[name] = layer
                checksums[name] = guard(layer, name)
        for name, layer in wrapped.items():
            unwrap(layer, name)
        if checksums:
            _require_same(context, checksums)
        if not wrapped and not guarded:
            return None

        def remove() -> None:
            for layer in guarded.values():
                unguard(layer)
            for layer in wrapped.values():
                restore(layer)

        return AppliedRewrite(name=self.name, modules=(*wrapped, *guarded), remove=remove)


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
