"""A layer of experts for a user's own models: a router, experts of any kind, and its gate's losses and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyaccel.comm.base import Communicator
from polyaccel.comm.groups import get_sequence_data_parallel_group
from polyaccel.core.types import ReduceOp
from polyaccel.errors import PolyaccelError
from polyaccel.torch.experts import gates
from polyaccel.torch.experts.gates import RoutingDecision
from polyaccel.torch.experts.products import GroupedProducts, Rowwise, computed
from polyaccel.torch.experts.routing import capacity_of, chosen_by_experts, kept_choices, route


def loss_free_balancer(model: nn.Module, ranks: Callable[[], Communicator]) -> Callable[[bool], None] | None:
    """What an engine calls after each update of `model`, with whether parameters changed: biases follow the tokens that
    experts got since the last call, or, where nothing changed, forget them. Collective over `ranks()`, those with their
    own batches or parts of sequences. None for a model without these biases."""
    layers = _with_biases(model)
    if not layers:
        return None
    communicator = ranks()

    def after_update(applied: bool) -> None:
        if applied:
            _follow(layers, communicator)
        for layer in layers:
            layer.load = None

    return after_update


def balance_experts(model: nn.Module, group: Communicator | None = None) -> None:
    """Let the biases of every `Mixture` in `model` follow the tokens that experts got since the last call, on all ranks
    of `group` (None: all with their own batches or parts of sequences) together. For training without an engine, after
    each step; every rank calls it. An engine does so itself, and leaves nothing to follow."""
    if layers := _with_biases(model):
        _follow(layers, get_sequence_data_parallel_group() if group is None else group)


def _with_biases(model: nn.Module) -> list[Mixture]:
    return [module for module in model.modules() if isinstance(module, Mixture) and module.bias_rate]


def _follow(layers: Sequence[Mixture], ranks: Communicator) -> None:
    """One exchange for all `layers`."""
    loads = [layer.raised.new_zeros(layer.num_experts) if layer.load is None else layer.load for layer in layers]
    together = torch.cat(loads).contiguous()
    ranks.all_reduce(ranks.accelerator.wrap(together), ReduceOp.SUM, label="tokens of experts")
    for layer, load in zip(layers, together.split_with_sizes([len(one) for one in loads]), strict=True):
        layer.raised += gates.load_direction(load)
        layer.load = None


Gate = Literal["softmax", "sigmoid", "expert choice"]
Noise = Literal["learned", "sample", "jitter"]
_JITTER = 1e-2


class MixtureOutput(NamedTuple):
    """What a `Mixture` makes of its tokens."""

    output: Tensor
    """As the input."""
    loss: Tensor
    """The balance loss plus the z loss, each times its weight; without dims."""
    tokens: Tensor
    """(experts,), int64: how many tokens of this rank chose each expert, dropped ones included."""
    dropped: Tensor
    """int64 without dims: how many choices came to nothing because an expert was full."""


class StackedExperts(nn.Module):
    """Experts of one kind, made by `make` one after the other: each parameter a stack (experts, ...), under its own
    name with `_` for `.`. An expert takes (rows, features) and gives as many rows, or a tuple that has them first.
    Called as experts of transformers are, so `expert_parallel` spreads them over ranks."""

    def __init__(self, make: Callable[[], nn.Module], num_experts: int) -> None:
        super().__init__()
        experts = [make() for _ in range(num_experts)]
        self.num_experts = num_experts
        self.names = {name: name.replace(".", "_") for name, _ in experts[0].named_parameters()}
        """The stack of each parameter of an expert."""
        self.products: GroupedProducts | None = None
        """What computes experts of linear layers all at once; None for one expert after the other."""
        if len(set(self.names.values())) < len(self.names) or any(True for _ in experts[0].buffers()):
            raise PolyaccelError(
                f"{type(experts[0]).__name__} has buffers, or parameters whose names differ by dots alone",
                hint="give experts made of parameters",
                value=type(experts[0]).__name__,
            )
        for name, own in self.names.items():
            values = [expert.get_parameter(name) for expert in experts]
            stack = nn.Parameter(torch.stack([value.detach() for value in values]), values[0].requires_grad)
            self.register_parameter(own, stack)
        self.__dict__["_expert"] = deepcopy(experts[0]).to("meta")
        self.__dict__["rowwise"] = Rowwise.from_expert(self.__dict__["_expert"])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (tokens, features): sums of experts' outputs times `top_k_weights`; numbers past the end drop."""
        routing = route(top_k_index, top_k_weights, self.num_experts)
        counts = routing.counts.tolist()
        routing = routing.keep(sum(counts))
        rows = hidden_states.index_select(0, routing.tokens)
        out = computed(self, rows, [(count,) for count in counts], self.products, None)
        if out is not None:
            return routing.combined(out, hidden_states)
        expert: nn.Module = self.__dict__["_expert"]
        expert.train(self.training)
        stacks = {name: getattr(self, own).unbind() for name, own in self.names.items()}
        made = [
            _first(functional_call(expert, {name: stack[number] for name, stack in stacks.items()}, (each,)))
            for number, each in enumerate(rows.split_with_sizes(counts))
            if len(each)
        ]
        return routing.combined(torch.cat(made), hidden_states) if made else torch.zeros_like(hidden_states)


def _first(made: Any) -> Tensor:
    out: Tensor = made[0] if isinstance(made, tuple) else made
    return out


class Mixture(nn.Module):
    """Experts, and a router that chooses some of them for each token.

    `gate`: `softmax` chooses the `k` experts with the highest probabilities, `sigmoid` those with the highest sigmoids
    plus a bias, which follows the load by `bias_rate` an update of the engine's, instead of a loss, unless the router
    is frozen; with `expert choice` each expert chooses the tokens that it has room for. `normalize` divides a token's
    weights by their sum: None does so where k > 1, for one weight would be 1 and the router would not be trained.

    Without `capacity_factor` nothing is dropped; with it an expert has room for that times its even share
    (`eval_capacity_factor` in evaluation), at least `min_capacity`, for this rank's tokens in their order or, with
    `drops_at_random`, in a random one. `noise` is added in training: `learned` (Shazeer et al. 2017), `sample` draws
    the first choice from the softmax, `jitter` multiplies the router's input by numbers from 0.99 to 1.01. See `gates`
    for formulas and sources.

    Raises PolyaccelError for settings that do not go together.
    """

    raised: Tensor
    """(experts,), int64: how often each bias was raised, less how often it was lowered; whole, so that no conversion to
    16 bits rounds it."""

    def __init__(
        self,
        hidden_size: int,
        make: Callable[[], nn.Module],
        num_experts: int,
        *,
        k: int = 2,
        gate: Gate = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        drops_at_random: bool = False,
        noise: Noise | None = None,
        balance_weight: float = 0.01,
        z_weight: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise PolyaccelError(f"k = {k} of {num_experts} experts", hint=f"use 1 to {num_experts}", value=k)
        if gate == "expert choice" and capacity_factor is None:
            raise PolyaccelError(
                "experts that choose tokens without a capacity", hint="give capacity_factor, for example 1.0"
            )
        if bias_rate and gate != "sigmoid":
            raise PolyaccelError(f"a bias of the gate {gate!r}", hint='use gate="sigmoid", or bias_rate=0', value=gate)
        self.normalize = gate != "expert choice" and gates.is_normalized(normalize, k)
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.spread = nn.Linear(hidden_size, num_experts, bias=False) if noise == "learned" else None
        self.experts = StackedExperts(make, num_experts)
        if bias_rate:
            self.register_buffer("raised", torch.zeros(num_experts, dtype=torch.int64))
        self.load: Tensor | None = None
        """(experts,), int64: the tokens of this rank that biases have not followed yet."""
        self.num_experts, self.k, self.gate, self.noise = num_experts, k, gate, noise
        self.scale, self.min_capacity = scale, min_capacity
        self.factors = {True: capacity_factor, False: eval_capacity_factor or capacity_factor}
        self.drops_at_random = drops_at_random
        self.balance_weight, self.z_weight, self.bias_rate = balance_weight, z_weight, bias_rate

    def forward(self, x: Tensor) -> MixtureOutput:
        """What the experts make of `x` (..., hidden size)."""
        tokens = x.reshape(-1, x.shape[-1])
        seen = tokens
        if self.training and self.noise == "jitter":
            seen = tokens * torch.empty_like(tokens).uniform_(1.0 - _JITTER, 1.0 + _JITTER)
        logits = self.router(seen).float()
        choice = self._choose(logits, seen)
        factor = self.factors[self.training]
        capacity = None
        if factor is not None:
            capacity = capacity_of(len(tokens), self.num_experts, self.k, factor, self.min_capacity)
        if self.chooses_tokens:
            assert capacity is not None  # required by the constructor
            kept = chosen_by_experts(choice.scores, capacity)
            counts = kept.sum(0)
            dropped = counts.new_zeros(())
        else:
            order = torch.rand(len(tokens), device=x.device) if self.drops_at_random and self.training else None
            kept = kept_choices(choice.experts, self.num_experts, capacity, order)
            counts = gates.tokens_of(choice.experts, self.num_experts)
            dropped = kept.numel() - kept.sum()
        index = choice.experts.masked_fill(~kept, self.num_experts)
        out = self.experts(tokens, index, choice.weights).view_as(x)
        if self.bias_rate and self.training and torch.is_grad_enabled() and self.router.weight.requires_grad:
            self.load = counts if self.load is None else self.load + counts
        loss = self.balance_weight * gates.balance_loss(choice) + self.z_weight * gates.z_loss(logits)
        return MixtureOutput(out, loss, counts, dropped)

    @property
    def chooses_tokens(self) -> bool:
        """Whether experts choose tokens: then a token without an expert was not dropped."""
        return self.gate == "expert choice"

    def _choose(self, logits: Tensor, seen: Tensor) -> RoutingDecision:
        if self.gate == "sigmoid":
            bias = self.raised * self.bias_rate if self.bias_rate else None
            return gates.sigmoid_choice(logits, self.k, bias=bias, normalize=self.normalize, scale=self.scale)
        if self.chooses_tokens:
            scores = torch.softmax(logits, dim=-1)
            numbers = torch.arange(self.num_experts, device=logits.device).expand(len(logits), -1)
            return RoutingDecision(numbers, scores, scores)
        by = None
        if self.training and self.spread is not None:
            logits = gates.noisy_logits(logits, self.spread(seen), torch.randn_like(logits))
        elif self.training and self.noise == "sample":
            tiny = torch.finfo(logits.dtype).tiny
            by = logits + gates.gumbel_noise(torch.rand_like(logits).clamp_(min=tiny))
        return gates.softmax_choice(logits, self.k, normalize=self.normalize, by=by)
