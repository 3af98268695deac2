"""DeepSpeed's layers of experts: `MoE`, and the `MOELayer` and `Experts` that it is made of.

Every rank builds all experts of a layer, and `deepspeed.initialize` leaves it those that are its own: `ep_size` of the
layers becomes the axis `expert` of the mesh. What a layer computes does not depend on where its experts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.experts.layer import StackedExperts
from polyaccel_deepspeed.experts.gates import TopKGate

_POLICIES = (None, "None", "Jitter", "RSample")
_keeps_stacks = ContextVar("keeps_stacks", default=False)


@contextmanager
def stacks_in_state_dicts() -> Iterator[None]:
    """State dicts meanwhile have the stacks of experts, as the engine that gathers them needs."""
    token = _keeps_stacks.set(True)
    try:
        yield
    finally:
        _keeps_stacks.reset(token)


def single_names(model: nn.Module) -> dict[str, tuple[str, str]]:
    """What stands before and behind an expert's number in DeepSpeed's names, by the name of each stack in `model`."""
    return {
        f"{prefix}.{own}".removeprefix("."): (f"{prefix}.deepspeed_experts.".removeprefix("."), f".{name}")
        for prefix, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, Experts)
        for name, own in part.names.items()
    }


def with_single_experts(state: Mapping[str, Any], names: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """`state` with views of each stack under the names of its experts."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name in names:
            before, behind = names[name]
            found |= {f"{before}{number}{behind}": each for number, each in enumerate(value.unbind())}
        else:
            found[name] = value
    return found


class Experts(StackedExperts):
    """Copies of `expert`: each parameter a stack (experts, ...) under its name with `_` for `.`."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__(lambda: deepcopy(expert), num_local_experts)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]  # DeepSpeed's marks
            parameter.group_name = expert_group_name  # type: ignore[attr-defined]

    @property
    def num_local_experts(self) -> int:
        """The experts of this rank."""
        return self.num_experts

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Under DeepSpeed's names, as views of the stacks; the stacks themselves with `keep_vars`."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and not _keeps_stacks.get():
            for name, own in self.names.items():
                for number, value in enumerate(destination.pop(f"{prefix}{own}").unbind()):
                    destination[f"{prefix}deepspeed_experts.{number}.{name}"] = value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also from the names of DeepSpeed, where each expert has its own."""
        for name, own in self.names.items():
            keys = [f"{prefix}deepspeed_experts.{number}.{name}" for number in range(self.num_experts)]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{own}"] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *args)


class MOELayer(nn.Module):
    """A gate and `Experts`. The gate is called with tokens (tokens, features), `used_token`, True for sparse routes and
    `use_tutel`, and gives what `TopKGate` does."""

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: Any,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size = ep_group_name, ep_size
        self.use_tutel = use_tutel

    @property
    def num_local_experts(self) -> int:
        """The experts of this rank."""
        return int(self.experts.num_experts)  # type: ignore[arg-type]

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        """What the experts make of the first argument (..., features); the second are the tokens that count, or None.
        The gate's loss and the tokens an expert are attributes afterwards."""
        hidden_states, used_token = inputs[0], inputs[1] if len(inputs) > 1 else None
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes = self.gate(tokens, used_token, True, self.use_tutel)
        self.l_aux, _, count, experts, _, weights, self.exp_counts = routes
        index = torch.where(experts < 0, count, experts).T.long()
        out: Tensor = self.experts(tokens, index, weights.T)
        return out.view_as(hidden_states)


class MoE(nn.Module):
    """`num_experts` copies of `expert` behind a gate; with `use_residual` in addition to `expert` itself, both weighted
    by what a linear layer makes of the token (PR-MoE: Rajbhandari et al. 2022, "DeepSpeed-MoE").

    `use_tutel` and `enable_expert_tensor_parallelism` have no effect: grouping is our own, and experts are cut like
    other layers where the config has tensor ranks. Raises PolyaccelError for sizes that do not go together and for an
    unknown policy.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= ep_size <= num_experts:
            raise PolyaccelError(
                f"ep_size = {ep_size} for {num_experts} experts", hint=f"use 1 to {num_experts}", value=ep_size
            )
        if not 1 <= k <= num_experts:
            raise PolyaccelError(f"k = {k} of {num_experts} experts", hint=f"use 1 to {num_experts}", value=k)
        if noisy_gate_policy not in _POLICIES:
            raise PolyaccelError(
                f"noisy_gate_policy {noisy_gate_policy!r}",
                hint='use "Jitter", "RSample" or None',
                value=noisy_gate_policy,
            )
        self.use_residual, self.ep_size, self.num_experts = use_residual, ep_size, num_experts
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy,
            drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        experts = Experts(expert, num_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, num_experts, use_tutel)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def num_local_experts(self) -> int:
        """The experts of this rank."""
        return self.deepspeed_moe.num_local_experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Accepted. `deepspeed.initialize` spreads the experts."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts make of `hidden_states` (..., features), the gate's loss, and the tokens an expert."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., :1] + dense * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
