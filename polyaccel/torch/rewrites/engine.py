"""What the engine does to the model while it is built: buckets of parameters, matrix products, recomputation."""

from __future__ import annotations

from weakref import WeakMethod

from polyaccel.torch.activation_checkpointing.blocks import Recomputation
from polyaccel.torch.linears import Linears
from polyaccel.torch.rewrites.base import AppliedRewrite, RewritableEngine, Rewrite, RewriteContext


class ZeroShards(Rewrite):
    """Parameters in flat buckets, sharded over the data ranks as the stage says."""

    name = "zero_optimization"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        engine = engine_of(context)
        names = engine.shard_parameters()
        method = WeakMethod(engine.unshard_parameters)  # an engine that nothing else refers to is freed at once

        def remove() -> None:
            if (unshard := method()) is not None:
                unshard()

        return AppliedRewrite(name=self.name, parameters=names, remove=remove, is_collective=True)


class MatrixKernels(Rewrite):
    """Linear layers over the accelerator's own matrix products, where it has faster ones than torch."""

    name = "matrix_kernels"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        engine, choice = engine_of(context), context.settings.matrix_kernels
        linears = engine.linears = Linears(context.model, engine.accelerator, engine.communicator, choice)
        if not linears.names:
            return None
        return AppliedRewrite(name=self.name, modules=linears.names, remove=linears.release)


class ActivationCheckpointing(Rewrite):
    """Blocks whose activations are computed again in the backward pass."""

    name = "activation_checkpointing"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return context.settings.recompute is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError for a model in which no blocks are found."""
        engine, runtime = engine_of(context), context.runtime
        done = engine.recomputation = Recomputation(
            context.model,
            context.settings.recompute,
            engine.accelerator,
            runtime.process_group_for,
            engine.saved_tensor_hooks,
            runtime.trace,
        )
        if done.blocks is None:
            return None
        return AppliedRewrite(name=self.name, modules=done.blocks.names, remove=done.release)


def engine_of(context: RewriteContext) -> RewritableEngine:
    """The engine that is being built."""
    assert context.engine is not None  # the engine applies the rewrites that need one
    return context.engine
