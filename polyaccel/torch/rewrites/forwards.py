"""What a forward pass computes with: element types of buffers, sequences cut over ranks, tiles."""

from __future__ import annotations

from polyaccel.engine.policies.modules import module_rules_of
from polyaccel.torch.context_parallel import SequenceSettings, apply_context_parallel
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.settings import TileSettings
from polyaccel.torch.sharding.specs import convert_buffers
from polyaccel.torch.tiled.models import TiledModel
from polyaccel.torch.tiled.tokenwise import TokenwiseLayers


class BufferTypes(Rewrite):
    """Floating buffers in the element type of the parameters."""

    name = "data_types"

    def is_on(self, context: RewriteContext) -> bool:
        return module_rules_of(context.runtime.config).buffer_dtype is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        rules = module_rules_of(context.runtime.config)
        converted = convert_buffers(context.model, rules.buffer_dtype, rules.keep_in_fp32)
        return AppliedRewrite(name=self.name, modules=converted) if converted else None


class SequenceParallel(Rewrite):
    """Sequences cut over the ranks along `sequence`, unless the script does that itself."""

    name = "sequence_parallel"

    def is_on(self, context: RewriteContext) -> bool:
        is_manual = context.runtime.config.sequence_parallel.method == "manual" or context.has_own_mesh
        return context.size_of("sequence") > 1 and not is_manual

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PolyaccelError as `apply_context_parallel` and `TokenwiseLayers`."""
        section = context.runtime.config.sequence_parallel
        assert section.method != "manual"  # else the rewrite is off
        ranks = context.runtime.process_group_for(("sequence",))
        if section.method == "tokenwise":
            layers = TokenwiseLayers(context.model, ranks)
            return AppliedRewrite(name=self.name, modules=layers.module_names, remove=layers.remove)
        settings = SequenceSettings(section.method, section.core_attention)
        done = apply_context_parallel(context.model, ranks, settings)
        return AppliedRewrite(name=self.name, modules=done.module_names, remove=done.remove)


class TiledCompute(Rewrite):
    """The loss and feed-forward layers computed in tiles of tokens."""

    name = "tiled_compute"

    def is_on(self, context: RewriteContext) -> bool:
        return context.runtime.config.tiled_compute.enabled

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError for a model of which a part that is to be tiled is not found."""
        section = context.runtime.config.tiled_compute
        done = TiledModel(context.model, TileSettings(**section.model_dump(exclude={"enabled"})))
        return AppliedRewrite(name=self.name, modules=done.module_names, remove=done.release)
