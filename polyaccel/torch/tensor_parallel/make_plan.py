"""Choose a sharding plan: the user's specs first, then the model's `tp_plan`, then a heuristic on its structure.

[Note: Structure-based cut plan]
A style says that a layer is cut by columns, and not where: between heads, inside the parts of a fused layer, between
the key heads that several queries share. So where the structure shows a region whose layers are all wished to be cut,
the region defines how; only what no region covers is cut evenly, by its style.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from polyaccel.core.block import Block
from polyaccel.engine.policies.modules import CutRules, LayerRule
from polyaccel.errors import ShardingError
from polyaccel.torch.deferred_init.log import return_holes
from polyaccel.torch.sharding.tensor_shard import TensorShard, local_slice
from polyaccel.torch.tensor_parallel.comparison import ProvenRegions, proven_regions
from polyaccel.torch.tensor_parallel.names import HEAD_SIZE
from polyaccel.torch.tensor_parallel.plan import (
    CutHeads,
    CutModule,
    CutPlan,
    RunsOfRanks,
    concatenated,
    even_runs,
    lengths,
    shifted,
)
from polyaccel.torch.tensor_parallel.sequence_parallel import with_shared_tokens
from polyaccel.torch.tensor_parallel.structure import (
    CutRegion,
    Structure,
    column,
    inputs_of,
    is_linear,
    outputs_of,
    query_heads,
    row,
)
from polyaccel.torch.tensor_parallel.styles import ParallelStyle, wishes_of_hugging_face, wishes_of_specs
from polyaccel.torch.tensor_parallel.trial_inputs import weights_read_by_others


def make_plan(
    model: nn.Module,
    ranks: int,
    *,
    specs: Sequence[LayerRule] = (),
    use_defaults: bool = True,
    gather_logits: bool = True,
    share_tokens: bool = False,
    compare: bool = True,
) -> CutPlan:
    """How to cut `model` over `ranks` ranks; it may be on the meta device.

    `specs` come first; with `use_defaults` follows the model's own plan, or the structure where it has none. Without
    `gather_logits` the outputs of the output layer stay cut, for a loss that takes them so. With `share_tokens` ranks
    share the tokens between the layers too. With `compare` each block is computed whole and cut, and stays whole where
    the two differ ([Note: Comparison of whole and cut blocks]). Raises ShardingError, naming the module, for a model
    that cannot be cut, unless its specs leave all layers whole.
    """
    structure = Structure(model, ranks)
    named = wishes_of_specs(structure.modules, specs)
    source = "tensor_parallel.partition_config"
    wished: dict[str, ParallelStyle] | None = dict(named)
    if use_defaults:
        own = wishes_of_hugging_face(model, structure.modules)
        output = output_layer(model)
        found = [structure.modules.get(name) for name in own]
        if all(each is output or isinstance(each, nn.Embedding) for each in found):
            own = {}  # a plan for words alone does not cover the layers
        source = "the model's own tp_plan" if own else "by structure"
        wished = {**own, **named} if own else None
    chosen = _Chosen(model, structure, ranks)
    prove = partial(proven_regions, model, ranks=ranks) if compare else _as_planned
    planned = [region for region in structure.regions() if _is_wished(region, wished, named)]
    proven = prove(list(chosen.without_replaced(planned)))
    for region in proven.regions:
        chosen.add(region.modules, region.heads)
    chosen.add_words(wished, gather_logits)
    rest = chosen.styled(wished or {}, {each.name for region in planned for each in region.modules})
    styled = prove(list(chosen.without_replaced(rest)))
    for region in styled.regions:
        chosen.add(region.modules, region.heads)
    whole = {**chosen.whole, **proven.whole, **styled.whole}
    return_holes()  # blocks that are cut next must not lie between what copies of the trials have left
    is_left_whole = bool(named) and not use_defaults and all(one.style == "whole" for one in named.values())
    if not chosen.modules and not is_left_whole:
        found_whole = next((f"{name} differs where it is cut: {reason}" for name, reason in whole.items()), None)
        reason = found_whole or "neither has it a tp_plan, nor layers recognised as attention or feed-forward"
        raise ShardingError(
            f"nothing of {type(model).__name__} can be cut: {reason}",
            hint="name its layers in tensor_parallel.partition_config.layer_specs: patterns, and column or row",
            value=type(model).__name__,
        )
    plan = replace(
        chosen.plan(source),
        whole=whole,
        unproven={**proven.unproven, **styled.unproven},
    )
    if share_tokens:
        plan = with_shared_tokens(plan, model, proven.regions)
    return plan if gather_logits else replace(plan, loss_sizes=_loss_sizes(model, structure, plan))


def _as_planned(regions: Sequence[CutRegion]) -> ProvenRegions:
    return ProvenRegions(tuple(regions), {}, {})


def _loss_sizes(model: nn.Module, structure: Structure, plan: CutPlan) -> tuple[int, ...]:
    """Return each rank's words. Raises ShardingError unless the output layer and its loss can be cut."""
    key = "tensor_parallel.vocab_parallel_lm_head"
    output = next((m for m in plan.modules if structure.modules[m.name] is output_layer(model)), None)
    if output is None or getattr(model, "loss_type", None) != "ForCausalLM":
        raise ShardingError(
            f"{key}: {type(model).__name__} has no causal loss over an output layer that is cut",
            hint=f"leave {key} out",
            value=type(model).__name__,
        )
    return lengths(output.cuts["weight"][1])


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that gives logits, as the model names it."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator, no-any-return]
    except (AttributeError, NotImplementedError):
        return None


def plan_by(model: nn.Module, ranks: int, rules: CutRules) -> CutPlan:
    """`make_plan` by the rules of a config."""
    return make_plan(
        model,
        ranks,
        specs=rules.layers,
        use_defaults=rules.use_defaults,
        gather_logits=rules.gather_logits,
        share_tokens=rules.share_tokens,
    )


def _is_wished(
    region: CutRegion, wished: Mapping[str, ParallelStyle] | None, named: Mapping[str, ParallelStyle]
) -> bool:
    """Whether a region is to be cut as it shows: all of it is wished, and its sections are not set."""
    if any(
        len(named[layer].sections) > 1 or named[layer].style == "whole" for layer in region.layers if layer in named
    ):
        return False
    return wished is None or all(layer in wished and wished[layer].style != "whole" for layer in region.layers)


class _Chosen:
    """The modules of a plan that is being made."""

    def __init__(self, model: nn.Module, structure: Structure, ranks: int) -> None:
        self._model = model
        self._structure = structure
        self._ranks = ranks
        self.modules: dict[str, CutModule] = {}
        self.whole: dict[str, str] = {}
        """Regions that stay whole, by name, with the reason."""
        self._heads: list[CutHeads] = []

    def plan(self, source: str) -> CutPlan:
        shapes = {name: tuple(each.shape) for name, each in self._model.named_parameters(remove_duplicate=False)}
        modules = tuple(self.modules.values())
        return CutPlan(type(self._model).__name__, self._ranks, modules, tuple(self._heads), shapes, source)

    def add(self, modules: Iterable[CutModule], heads: Iterable[CutHeads] = ()) -> None:
        """Raises ShardingError for a module that is cut twice."""
        for module in modules:
            if module.name in self.modules:
                raise ShardingError(f"{module.name} belongs to two regions that are cut", value=module.name)
            self.modules[module.name] = module
        self._heads += heads

    def without_replaced(self, regions: Iterable[CutRegion]) -> Iterator[CutRegion]:
        """Those without a module to which a script gave a forward: a class that shares would not be asked."""
        for region in regions:
            replaced = [one.name for one in region.modules if _is_replaced(self._structure.modules[one.name])]
            if replaced:
                self.whole[region.name] = f"a script gave {replaced[0]} another forward"
            else:
                yield region

    def styled(self, wished: Mapping[str, ParallelStyle], planned: Collection[str]) -> Iterator[CutRegion]:
        """What no region covers, by its style: of each module its layers. `planned` are those of all regions."""
        by_parent: dict[str, list[str]] = {}
        for name, wish in wished.items():
            is_done = name in self.modules or name in planned or name in self.whole
            if is_done or name not in self._structure.modules or wish.style in ("whole", "vocabulary"):
                continue
            if wish.style == "experts":
                raise ShardingError(
                    f"the experts {name} are not plain stacks of gate_up_proj and down_proj",
                    hint="leave them whole: tensor_parallel.partition_config with use_default_specs false",
                    value=name,
                )
            by_parent.setdefault(name.rpartition(".")[0], []).append(name)
        for parent, names in by_parent.items():
            sizes, heads = self._heads_of(parent, names, wished)
            modules = tuple(self._styled(parent, name, wished[name], sizes) for name in names)
            split = self._split_head_of(parent, sizes, modules) if heads else None
            if split is not None:
                self.whole[parent] = f"{self._ranks} ranks cannot share the heads of {split}"
                continue
            yield CutRegion(parent, (*modules, *self._styled_parameters(parent, wished, sizes)), heads, ())

    def _styled_parameters(self, parent: str, wished: Mapping[str, ParallelStyle], heads: int) -> Iterator[CutModule]:
        """The parameters of a module itself that its plan cuts, such as attention sinks of each head."""
        named = {
            f"{parent}.{own}": (own, p) for own, p in self._structure.modules[parent].named_parameters(recurse=False)
        }
        cuts = {
            own: (0, self._runs(name, p.shape[0], wished[name], heads))
            for name, (own, p) in named.items()
            if p.dim() == 1 and name in wished and wished[name].style == "column"
        }
        if cuts:
            yield CutModule(parent, "shared weights", cuts)

    def _split_head_of(self, parent: str, heads: int, modules: Sequence[CutModule]) -> str | None:
        """The first layer with fewer key heads than an attention module has query heads, of which a rank would have a
        part of one."""
        module = self._structure.modules[parent]
        size = next((found for each in HEAD_SIZE if isinstance(found := getattr(module, each, None), int)), 0)
        for cut in modules if size else ():
            for _, runs in cut.cuts.values():
                is_of_keys = sum(lengths(runs)) < heads * size
                if is_of_keys and any(start % size or count % size for run in runs for start, count in run):
                    return cut.name
        return None

    def _styled(self, parent: str, name: str, wish: ParallelStyle, heads: int) -> CutModule:
        layer = self._structure.modules[name]
        if wish.style == "shared weights":
            return CutModule(name, "shared weights", names=tuple(each for each, _ in layer.named_parameters()))
        if wish.style == "shared tail":
            tail = getattr(self._structure.modules[parent], "qk_rope_head_dim", None)
            if not isinstance(tail, int):
                raise _unknown(name, "its attention has no qk_rope_head_dim")
            first = outputs_of(layer) - tail
            return CutModule(name, "shared tail", rows=(((first, tail),),) * self._ranks, why="whole")
        if wish.style == "features" and isinstance(layer, nn.Embedding):
            runs = even_runs(layer.embedding_dim, self._ranks)
            return CutModule(name, "features", {"weight": (1, runs)}, sizes=lengths(runs))
        if not is_linear(layer):
            raise _unknown(name, f"a {type(layer).__name__} is not a plain linear layer")
        width = inputs_of(layer) if wish.style == "row" else outputs_of(layer)
        runs = self._runs(name, width, wish, heads)
        if wish.style == "row":
            return row(name, layer, runs, split=wish.is_split)
        return column(name, layer, runs, gathered=wish.is_gathered)

    def _runs(self, name: str, width: int, wish: ParallelStyle, heads: int) -> RunsOfRanks:
        sections = wish.sections
        if -1 in sections:
            if width % len(sections):
                raise _unknown(name, f"{width} features are not {len(sections)} equal parts")
            sections = (width // len(sections),) * len(sections)
        if wish.is_gathered or wish.is_split:
            return even_runs(width, self._ranks)  # in order, or what is gathered would not be
        pieces, first = [], 0
        for length in sections:
            units = heads if heads and length % heads == 0 else length
            if units < self._ranks:
                raise _unknown(name, f"{self._ranks} tensor ranks cannot share {units} heads or features")
            pieces.append(shifted(even_runs(units, self._ranks, unit=length // units), first))
            first += length
        return concatenated(*pieces)

    def _heads_of(
        self, parent: str, names: Sequence[str], wished: Mapping[str, ParallelStyle]
    ) -> tuple[int, tuple[CutHeads, ...]]:
        """The heads of an attention module whose layers are cut by their styles; 0 for any other module."""
        module = self._structure.modules.get(parent)
        cut = [wished[name] for name in names if wished[name].style in ("column", "row")]
        is_whole = all(wish.is_gathered or wish.is_split for wish in cut)
        if module is None or is_whole or "attention" not in type(module).__name__.lower():
            return 0, ()
        heads = query_heads(module) or query_heads(self._structure.config_of(module)) or 0
        if not heads:
            return 0, ()
        parts = lengths(even_runs(heads, self._ranks))
        if 0 in parts:
            raise _unknown(parent, f"{self._ranks} tensor ranks cannot share {heads} heads")
        own = {each: parts for each in ("num_heads", "num_attention_heads") if getattr(module, each, 0) == heads}
        return heads, (CutHeads(parent, own, dict.fromkeys(own, parts)),)

    def add_words(self, wished: Mapping[str, ParallelStyle] | None, gather_logits: bool) -> None:
        """Embeddings and output layers, by words: all that share a weight in the same way."""
        words = self._input_words()
        for parameter, owners in self._owners().items():
            modules = {name: self._structure.modules[name] for name in owners}
            embeddings = [each for each in modules.values() if isinstance(each, nn.Embedding)]
            outputs = [name for name, each in modules.items() if is_linear(each) and name not in self.modules]
            if len(embeddings) + len(outputs) < len(modules) or any(not _is_plain(each) for each in embeddings):
                if len(modules) > 1 or any(map(_is_replaced, modules.values())):  # else its own style may cut it
                    self.whole.update(dict.fromkeys(modules, "its weight is that of a module that cannot be cut"))
                continue
            if wished is None:
                is_wanted = parameter is words or (bool(embeddings) and bool(outputs))
                is_wanted = is_wanted or (parameter.shape[0] == _length(words) and self._is_output(outputs))
            else:
                is_wanted = any(wished.get(name, ParallelStyle("whole")).style != "whole" for name in owners)
                is_wanted = is_wanted and (bool(embeddings) or parameter.shape[0] == _length(words))
            if not is_wanted or parameter.shape[0] < self._ranks:
                continue
            if readers := weights_read_by_others(self._model, owners):
                self.whole.update({name: f"{reader} reads its weight" for name, reader in readers.items()})
                continue
            runs = even_runs(parameter.shape[0], self._ranks)
            self.add(self._of_words(modules, runs, gather_logits))

    def _of_words(self, modules: Mapping[str, nn.Module], runs: RunsOfRanks, gathered: bool) -> Iterator[CutModule]:
        for name, module in modules.items():
            if isinstance(module, nn.Embedding):
                own = {"num_embeddings": lengths(runs)}
                yield CutModule(name, "vocabulary", {"weight": (0, runs)}, rows=runs, attributes=own)
            else:
                yield column(name, module, runs, gathered=gathered)

    def _owners(self) -> dict[nn.Parameter, list[str]]:
        """By weight all modules that have it, where it is a matrix."""
        found: dict[nn.Parameter, list[str]] = {}
        for name, module in self._structure.modules.items():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                found.setdefault(weight, []).append(name)
        return found

    def _input_words(self) -> nn.Parameter | None:
        try:
            found = self._model.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            return None
        return found._parameters["weight"] if isinstance(found, nn.Embedding) else None

    def _is_output(self, names: Sequence[str]) -> bool:
        output = output_layer(self._model)
        return any(self._structure.modules[name] is output for name in names)


def _is_plain(embedding: nn.Embedding) -> bool:
    """Return whether an embedding may be cut by words: nothing needs its whole weight."""
    own = type(embedding).forward
    wraps = own is nn.Embedding.forward or "super" in getattr(getattr(own, "__code__", None), "co_names", ())
    is_plain = wraps and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse
    return is_plain and not _is_replaced(embedding)


def _is_replaced(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _length(parameter: nn.Parameter | None) -> int:
    return -1 if parameter is None else parameter.shape[0]


def _unknown(name: str, why: str) -> ShardingError:
    return ShardingError(
        f"{name} cannot be cut: {why}",
        hint="leave it out, or define it: tensor_parallel.partition_config.layer_specs",
        value=name,
    )


def shared_by(ranks: int, rules: CutRules) -> Callable[[nn.Module], None]:
    """What makes of a model what the first of `ranks` ranks has of it (`cut_shapes`)."""
    return lambda model: cut_shapes(model, plan_by(model, ranks, rules)) if ranks > 1 else None


def cut_shapes(model: nn.Module, plan: CutPlan) -> None:
    """Give `model`'s parameters the first rank's shapes, the largest ones; it must not be run."""
    modules, blocks = dict(model.named_modules()), dict[nn.Parameter, Block]()
    for each in plan.modules:
        for name in each.cuts:
            parameter = modules[each.name]._parameters[name]
            if parameter is not None and parameter not in blocks:
                blocks[parameter] = plan.block(each, name, 0)
                parameter.data = local_slice(parameter.data, blocks[parameter])
    for module in modules.values():
        own = {
            name: TensorShard(blocks[one])
            for name, one in module._parameters.items()
            if one is not None and one in blocks
        }
        if own:
            module.parallel_cuts = own
