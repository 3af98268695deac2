"""What is to be cut of a model, in others' formats: Hugging Face's plans, DeepSpeed's layer specs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from polyaccel.engine.policies.modules import LayerRule
from polyaccel.errors import ShardingError

Style = Literal["column", "row", "vocabulary", "features", "experts", "shared weights", "shared tail", "whole"]
Sections = tuple[int, ...]


@dataclass(frozen=True)
class ParallelStyle:
    """That one module be cut. `is_gathered` columns give whole outputs, `is_split` rows take whole inputs; `sections`
    are the lengths of the parts that a fused layer consists of, (-1,) a single one."""

    style: Style
    is_gathered: bool = False
    is_split: bool = False
    sections: Sections = (-1,)


def wishes_of_specs(modules: Mapping[str, nn.Module], specs: Sequence[LayerRule]) -> dict[str, ParallelStyle]:
    """Return the first spec that matches each layer. Raises ShardingError for unused patterns."""
    found: dict[str, ParallelStyle] = {}
    used: set[LayerRule] = set()
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):  # torch has modules named "weight" too
            continue
        spec = next((spec for spec in specs if spec.matches(name)), None)
        if weight.dim() != 2 and not (spec is not None and spec.grad_allreduce):
            continue
        if spec is not None:
            used.add(spec)
            found[name] = _wish_of_spec(spec, weight.shape)
    for spec in specs:
        if spec not in used:
            raise ShardingError(
                f"no layer of the model matches {list(spec.patterns)}",
                hint="tensor_parallel.partition_config.layer_specs: patterns match names like "
                f"{next(iter(_weights(modules)), 'layer.weight')!r} from their beginning",
                value=spec.patterns,
            )
    return found


def wishes_of_hugging_face(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, ParallelStyle]:
    """Return the model's own plan, or {}. Raises ShardingError for an unknown style."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    names = [*modules, *(name for name, _ in model.named_parameters())]
    found: dict[str, ParallelStyle] = {}
    for name in names:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style in (None, "local_params"):  # a module's own parameters: the layout of its layers defines theirs
            continue
        if style not in _STYLES:
            raise ShardingError(
                f"the plan of {type(model).__name__} wants {name} cut as {style!r}, which polyaccel does not do",
                hint="define it by tensor_parallel.partition_config with use_default_specs false",
                value=style,
            )
        found[name] = _STYLES[style]
    return found


_STYLES: dict[str, ParallelStyle] = {
    "colwise": ParallelStyle("column"),
    "colwise_rep": ParallelStyle("column", is_gathered=True),
    "colwise_gather_output": ParallelStyle("column", is_gathered=True),
    "packed_colwise": ParallelStyle("column", sections=(-1, -1)),
    "packed_rowwise": ParallelStyle("row", sections=(-1, -1)),
    "rowwise": ParallelStyle("row"),
    "rowwise_rep": ParallelStyle("row", is_split=True),
    "rowwise_split_input": ParallelStyle("row", is_split=True),
    "embedding_rowwise": ParallelStyle("vocabulary"),
    "embedding_colwise": ParallelStyle("features"),
    "replicated_with_grad_allreduce": ParallelStyle("shared weights"),
    "mla_kv_a_proj": ParallelStyle("shared tail"),
    "moe_tp_experts": ParallelStyle("experts"),
    "moe_identity_expert": ParallelStyle("whole"),
    "replicate": ParallelStyle("whole"),
    "sequence_parallel": ParallelStyle("whole"),
}


def _wish_of_spec(spec: LayerRule, shape: Sequence[int]) -> ParallelStyle:
    if spec.partition_type == "skip":
        return ParallelStyle("shared weights" if spec.grad_allreduce else "whole")
    if spec.shape is None:
        is_gathered = spec.gather_output and spec.partition_type == "column"
        return ParallelStyle(spec.partition_type, is_gathered=is_gathered)
    dim = spec.partition_dim
    if dim is None:
        dim = 0 if spec.partition_type == "column" else 1
    lengths: Any = spec.shape[dim] if dim < len(spec.shape) else None
    if isinstance(lengths, int) and len(spec.shape) > len(shape):  # (3, -1, hidden): three equal parts before the rest
        lengths = (shape[dim] // lengths,) * lengths if lengths > 0 else (shape[dim],)
    elif isinstance(lengths, int):
        parts = lengths if lengths > 0 else 1
        lengths = (shape[dim] // parts,) * parts
    if lengths is None or sum(lengths) != shape[dim]:
        raise ShardingError(
            f"a weight of shape {tuple(shape)} that {list(spec.patterns)} match is not {spec.shape}",
            hint="tensor_parallel.partition_config.layer_specs.shape: the parts of the dimension add up to its length",
            value=spec.shape,
        )
    return ParallelStyle(spec.partition_type, sections=tuple(lengths))


def _weights(modules: Mapping[str, nn.Module]) -> Iterable[str]:
    return (f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Linear))
