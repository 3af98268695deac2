"""The section `optimizer`, and what the optimizers that polyaccel has by name take as `params`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from polyaccel.config.section import Listed, NonNegativeFloat, Params, PositiveFloat, Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Listed[tuple[Beta, Beta]]


def _only(allowed: bool, why: str) -> BeforeValidator:
    """Refuse the value of a flag that has no implementation, saying why."""

    def check(value: Any) -> Any:
        if value is (not allowed):
            raise ValueError(f"should be {str(allowed).lower()}: {why}")
        return value

    return BeforeValidator(check)


# Flags with one permitted value; they are left out of a resolved optimizer's arguments.
Amsgrad = Annotated[bool, _only(False, "AMSGrad is not available in this version")]
Fp32States = Annotated[bool, _only(True, '"state_bits": 8 or "bf16_optimizer_states" have narrower states')]
Decoupled = Annotated[bool, _only(True, "AdamW decays weights apart from the gradient; coupled decay is 'Adam'")]
StateBits = Literal[8, 32]


class OptimizerConfig(Section):
    """The optimizer to build when the caller passes none."""

    type: str
    """Adam, AdamW, Adamax, SGD, Adagrad, Lion, Lamb, Muon, MuAdam, MuAdamW, MuSGD in any case, or the exact name of a
    class in torch.optim."""
    params: Params = Field(default_factory=dict, validate_default=True)
    """Its arguments. Those of the named optimizers are checked; a torch class gets them as they are."""


class EmaConfig(Section):
    """An exponential moving average of weights, which is evaluated by `engine.averaged_weights()`."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """What is kept of the average in a step; the rest is the new weights."""


class NoiseScaleConfig(Section):
    """The gradient noise scale, from norms of ranks' gradients and of micro-batches."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """What is kept of its two averages in a step. 0 has each step for itself, which is very noisy."""


class AdamWParams(Section):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the two moments."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. Without it there is none, as in DeepSpeed; torch.optim.AdamW takes 0.01."""
    bias_correction: bool = True
    """Correct the moments for their start at zero."""
    adam_w_mode: Decoupled = True
    """Always true for AdamW."""
    amsgrad: Amsgrad = Field(False, exclude=True)
    """Not available."""
    torch_adam: bool = Field(False, exclude=True)
    """DeepSpeed's switch to torch's implementation. There is one here, whose update is torch's, so both values have the
    same effect."""
    fp32_optimizer_states: Fp32States = Field(True, exclude=True)
    """Moments are float32, unless `state_bits` or `bf16.bf16_optimizer_states` say otherwise."""
    state_bits: StateBits = 32
    """Bits of an element of the moments: 32, or 8 in blocks of 256 with a scale each (Dettmers et al. 2022)."""


class AdamParams(AdamWParams):
    """DeepSpeed's Adam: decoupled decay unless `adam_w_mode` is false (then Kingma & Ba 2015 with L2)."""

    adam_w_mode: bool = True
    """Decouple weight decay from the gradient."""


class SgdParams(Section):
    """Stochastic gradient descent as in torch.optim.SGD."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    momentum: NonNegativeFloat = 0.0
    """Momentum."""
    dampening: float = 0.0
    """Dampening of the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""
    nesterov: bool = False
    """Nesterov momentum; needs `momentum` above 0 and `dampening` 0."""


class AdagradParams(Section):
    """Adagrad (Duchi et al. 2011) as in torch.optim.Adagrad."""

    lr: NonNegativeFloat = 1e-2
    """Learning rate."""
    lr_decay: NonNegativeFloat = 0.0
    """Decay of the learning rate with the step."""
    initial_accumulator_value: NonNegativeFloat = 0.0
    """The sum of squares at the start."""
    eps: NonNegativeFloat = 1e-10
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""


class AdamaxParams(Section):
    """Adamax (Kingma & Ba 2015, algorithm 2) as in torch.optim.Adamax."""

    lr: NonNegativeFloat = 2e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the average and of the largest magnitude."""
    eps: NonNegativeFloat = 1e-8
    """Added to the gradient's magnitude."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""


class LionParams(Section):
    """Lion (Chen et al. 2023)."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.99)
    """Decay of the update's average and of the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    state_bits: StateBits = 32
    """Bits of an element of the momentum: 32, or 8 in blocks of 256 with a scale each (Dettmers et al. 2022)."""


class LambParams(Section):
    """LAMB (You et al. 2020)."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the two moments."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, part of the direction."""
    bias_correction: bool = True
    """Correct the moments for their start at zero."""
    max_coeff: PositiveFloat = 10.0
    """Upper bound of the trust ratio."""
    min_coeff: NonNegativeFloat = 0.01
    """Lower bound of the trust ratio."""
    amsgrad: Amsgrad = Field(False, exclude=True)
    """Not available."""


class MuonParams(Section):
    """Muon (Jordan et al. 2024) for matrices, AdamW for all else. A parameter's attribute `use_muon` says which it
    gets; without one, matrices get Muon unless their names have "embed" or "lm_head"."""

    lr: NonNegativeFloat | None = None
    """Learning rate of both. null is 0.02 for Muon and 3e-4 for AdamW."""
    muon_lr: NonNegativeFloat | None = None
    """Learning rate of Muon; null is `lr`."""
    adam_lr: NonNegativeFloat | None = None
    """Learning rate of AdamW; null is `lr`."""
    momentum: Beta = 0.95
    """Decay of Muon's momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of both."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps of an update."""
    ns_method: Literal["gram", "standard"] = "gram"
    """How the iteration is computed, in float32 on the CPU and in bfloat16 elsewhere. "gram" iterates on the product of
    a matrix with itself where that takes fewer operations."""
    per_head_muon: bool = False
    """Orthogonalise each attention head of the projections of queries, keys and values alone."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Scale of an update, as in torch.optim.Muon: sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns)),
    whose size is AdamW's."""
    tp_mode: Literal["gathered", "blockwise"] = "gathered"
    """Matrices that tensor ranks cut: gathered and orthogonalised whole, or each rank's block alone."""
    betas: Betas = (0.9, 0.95)
    """Decay of AdamW's moments."""
    eps: NonNegativeFloat = 1e-10
    """Added to AdamW's denominator."""
    adam_w_mode: Decoupled = Field(True, exclude=True)
    """Always true: decay is decoupled."""


class MuAdamParams(Section):
    """Adam of muP (Yang et al. 2022): coupled weight decay, as `mup.MuAdam` over torch.optim.Adam."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate at the base width."""
    betas: Betas = (0.9, 0.999)
    """Decay of the two moments."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay at the base width."""
    decoupled_wd: bool = False
    """Leave the weight decay as it is; else it is divided by the scale of the learning rate."""


class MuAdamWParams(MuAdamParams):
    """AdamW of muP, as `mup.MuAdamW`: decoupled weight decay."""

    weight_decay: NonNegativeFloat = 0.01
    """Weight decay at the base width."""


class MuSgdParams(SgdParams):
    """SGD of muP, as `mup.MuSGD`."""

    decoupled_wd: bool = False
    """Leave the weight decay as it is; else it is divided by the scale of the learning rate."""


OPTIMIZER_PARAMS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "Adamax": AdamaxParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "MuAdam": MuAdamParams,
    "MuAdamW": MuAdamWParams,
    "MuSGD": MuSgdParams,
}
"""The optimizers whose parameters we check, by the name that a `ResolvedConfig` uses for them."""
