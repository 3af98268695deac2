"""The optimizer of another tool on its way in: states by parameter, groups, and the family that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.format.imported import position_name
from polyaccel.core.tagged_json import is_serializable
from polyaccel.errors import CheckpointError

STEP = "step"
_COMPUTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of torch's optimizers that choose how the same numbers are computed: those of this run stay."""
_LABELS = frozenset(
    {
        "name", "names", "group_name", "param_names", "layer_id", "moe", "initial_lr", "params",
        "lr_scale", "lr_mult", "wd_mult", "max_lr", "min_lr", "is_expert_parallel", "is_decoupled_lr", "default_config",
    }
)  # fmt: skip
"""What scripts add to groups, which no update reads."""
_EVERY = {"lr", "weight_decay", "maximize"}
_SETTINGS: Mapping[str, frozenset[str]] = {
    family: frozenset({*_EVERY, *more})
    for family, more in {
        "Adam": {"betas", "eps", "amsgrad", "decoupled_weight_decay", "bias_correction", "correct_bias"},
        "NAdam": {"betas", "eps", "momentum_decay", "decoupled_weight_decay"},
        "RAdam": {"betas", "eps", "decoupled_weight_decay"},
        "Adamax": {"betas", "eps"},
        "Adagrad": {"lr_decay", "eps", "initial_accumulator_value", "amsgrad"},
        "Adadelta": {"rho", "eps"},
        "RMSprop": {"alpha", "eps", "momentum", "centered"},
        "Rprop": {"etas", "step_sizes"},
        "ASGD": {"lambd", "alpha", "t0"},
        "Sgd": {"momentum", "dampening", "nesterov"},
        "Lion": {"betas", "decoupled_weight_decay"},
        "Lamb": {"betas", "eps", "bias_correction", "max_coeff", "min_coeff", "max_grad_norm", "amsgrad"},
    }.items()
}
"""What the groups of each family have. Other settings are those of another formula: LARS keeps SGD's states."""


def family_of(states: Collection[str], keys: Collection[str]) -> str | None:
    """Return the optimizer family that keeps `states` and has groups with these `keys`; None if unknown."""
    held, known = set(states) - {STEP}, set(keys) - _COMPUTATION - _LABELS
    family = _by_states(held, known)
    return family if family is not None and known <= _SETTINGS[family] else None


def _by_states(held: set[str], known: set[str]) -> str | None:
    for family, (some, telling) in _TELLING.items():
        if held & some or known & telling:
            return family
    if held == {"exp_avg"}:
        return "Lion"
    if held and not ({"exp_avg", "exp_avg_sq"} <= held <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}):
        return None
    if "max_coeff" in known:
        return "Lamb"
    if "decoupled_weight_decay" in known and "amsgrad" not in known:
        return "RAdam"
    return "Adam" if held or "betas" in known else None


_TELLING: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "NAdam": (frozenset({"mu_product"}), frozenset({"momentum_decay"})),
    "Rprop": (frozenset({"prev"}), frozenset({"etas"})),
    "Adadelta": (frozenset({"acc_delta"}), frozenset({"rho"})),
    "RMSprop": (frozenset({"square_avg"}), frozenset({"centered"})),
    "ASGD": (frozenset({"ax"}), frozenset({"lambd"})),
    "Adamax": (frozenset({"exp_inf"}), frozenset()),
    "Adagrad": (frozenset({"sum"}), frozenset({"lr_decay"})),
    "Sgd": (frozenset({"momentum_buffer"}), frozenset({"dampening"})),
}
"""By family, the states and the groups' keys that no other one has."""


@dataclass(slots=True)
class PeerOptimizer:
    """States and groups as they are found: `add` for each state, then `joined` to what else there is."""

    origin: str
    tensors: list[ImportTensor] = field(default_factory=list)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    positions: list[int] | None = None
    left_out: list[LeftOut] = field(default_factory=list)

    def add_number(self, owner: str, name: str, value: float) -> None:
        """A state of one number."""
        self.numbers.setdefault(owner, {})[name] = float(value)

    def add_group(self, values: Mapping[str, Any], members: Iterable[str]) -> None:
        """A group with its hyperparameters; those that are not plain values are left out."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            if key == "params" or key in _COMPUTATION:
                continue
            plain = plain_value(value)
            if is_serializable(plain):
                kept[key] = plain
            else:
                kind = type(value).__name__
                self.left_out.append(LeftOut(f"{key!r} of group {len(self.groups)} of {self.origin}", f"a {kind}"))
        self.groups.append(kept)
        self.members.append([*members])

    def joined(self, incoming: Incoming, *, steps: int = 0) -> Incoming:
        """`incoming` with this optimizer. `steps` counts the updates of parameters whose states have no count."""
        if not self.groups and not self.tensors and not self.numbers:
            return replace(incoming, left_out=[*incoming.left_out, *self.left_out])
        states = {tensor.kind for tensor in self.tensors}
        named = {name for numbers in self.numbers.values() for name in numbers}
        keys = {key for group in self.groups for key in group}
        owners = dict.fromkeys([*(tensor.fqn for tensor in self.tensors), *self.numbers])
        counts = {fqn: int(self.numbers.get(fqn, {}).get(STEP, max(steps, 1))) for fqn in owners}
        family = family_of(states | named, keys)
        numbers = self.numbers
        if states and STEP not in named and family not in (None, "Sgd"):
            numbers = {fqn: {**numbers.get(fqn, {}), STEP: float(counts[fqn])} for fqn in owners}
            if not steps:
                raise CheckpointError(
                    f"{self.origin} has states of {family} without a count of updates",
                    hint="give --weights-only to begin with a new optimizer",
                    value=family,
                )
        return replace(
            incoming,
            tensors=[*incoming.tensors, *self.tensors],
            steps={**incoming.steps, **counts},
            groups=self.groups or [{}],
            members=None if self.positions is not None or not self.groups else self.members,
            positions=self.positions,
            family=family,
            numbers=numbers,
            left_out=[*incoming.left_out, *self.left_out],
        )


def by_position(groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The names of states by the keys that torch's own `state_dict` gives parameters in `groups`."""
    return {
        key: position_name(number, place)
        for number, group in enumerate(groups)
        for place, key in enumerate(group.get("params", ()))
    }


def plain_value(value: Any) -> Any:
    """A number in place of a tensor or an array of one, in lists too."""
    if type(value) in (list, tuple):
        return type(value)(map(plain_value, value))
    if not isinstance(value, (bool, int, float, str)) and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
