"""Linear layers that multiply in 8 or 4 bits."""

from __future__ import annotations

from polyaccel.engine.policies.low_precision import LowPrecisionPolicy, low_precision_policy_of
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.compression.layers import CompressedLayer
from polyaccel.torch.low_precision.formats import BLOCK
from polyaccel.torch.low_precision.layers import LowPrecisionForward, is_plain_linear, matching, release
from polyaccel.torch.low_precision.products import LowPrecision
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.tensor_parallel.layers import ColumnLayer, RowLayer

_KEY = "low_precision_linear"


class LowPrecisionLayers(Rewrite):
    """The layers that the config names, after layers were cut over ranks: what is compared there is not rounded. See
    [Note: Low precision products]."""

    name = _KEY

    def is_on(self, context: RewriteContext) -> bool:
        return low_precision_policy_of(context.runtime.config) is not None

    def check(self, context: RewriteContext) -> None:
        """Raise ConfigError for what replaces these layers, or has other tokens on each tensor rank."""
        config, mesh = context.runtime.config, context.runtime.mesh
        has_tensor = mesh.has_several("tensor")
        shares_tokens = has_tensor and config.tensor_parallel.sequence_sharded
        compressed = any(isinstance(part, CompressedLayer) for part in context.model.modules())
        wrong = [
            (
                "mesh.expert",
                mesh.size_of(("expert",)),
                "replaces layers of experts",
                "use 1",
                mesh.has_several("expert"),
            ),
            ("tiled_compute.enabled", True, "replaces these layers", "leave it out", config.tiled_compute.enabled),
            ("tensor_parallel.sequence_sharded", True, "gives ranks other tokens", "leave it out", shares_tokens),
            ("compression_training", "layers", "has these layers already", "use one of both", compressed),
        ]
        problems = [
            Problem(key, value, f"{what}, and {_KEY} computes them", hint) for key, value, what, hint, on in wrong if on
        ]
        if problems:
            raise ConfigError(problems)

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError where no layer has such a name, or a block of 32 elements would be cut over ranks."""
        policy = low_precision_policy_of(context.runtime.config)
        assert policy is not None  # it is on
        modules = dict(context.model.named_modules())
        how = LowPrecision(policy.recipe)
        found = [
            name
            for name in matching(modules.items(), policy.modules, policy.excluded)
            if isinstance(modules[name], (ColumnLayer, RowLayer)) or is_plain_linear(modules[name])
        ]
        if not found and not context.is_staged:
            hint = "name linear layers by a part of their full names"
            raise ConfigError(
                [Problem(f"{_KEY}.modules", list(policy.modules), "no linear layer has such a name", hint)]
            )
        cut = [name for name in found if isinstance(modules[name], (ColumnLayer, RowLayer))]
        if problems := [problem for name in cut for problem in _cut_blocks(policy, name, modules[name])]:
            raise ConfigError(problems)
        for name in found:
            layer = modules[name]
            if isinstance(layer, ColumnLayer):
                layer.share.low_precision = how.of_columns(layer.share.ranks.maximum)
            elif isinstance(layer, RowLayer):
                layer.share.low_precision = how.of_rows(layer.share.ranks.maximum)
            else:
                layer.__dict__["forward"] = LowPrecisionForward(layer, how)

        def remove() -> None:
            for name in found:
                release(modules[name])
            for name in cut:
                modules[name].share.low_precision = None

        return AppliedRewrite(name=self.name, modules=tuple(found), remove=remove)


def _cut_blocks(policy: LowPrecisionPolicy, name: str, layer: ColumnLayer | RowLayer) -> list[Problem]:
    """What is wrong with a cut layer: blocks of an operand that would lie on two ranks."""
    is_column = isinstance(layer, ColumnLayer)
    size = layer.weight.shape[1 if is_column == layer.share.is_transposed else 0]
    if not policy.recipe.startswith("mx") or size % BLOCK == 0:
        return []
    what = f"has blocks of {BLOCK}, and a rank has {size} {'outputs' if is_column else 'inputs'} of {name!r}"
    return [Problem(f"{_KEY}.recipe", policy.recipe, what, f"name it in {_KEY}.excluded_modules")]
