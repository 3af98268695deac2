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
    """One of Adam, AdamW, Adamax, SGD, Adagrad, Lion, Lamb, Muon, MuAdam, MuAdamW, MuSGD, ScheduleFreeAdamW, Sophia,
    CAME, Shampoo and SOAP in any case, or the exact name of a class in torch.optim."""
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
    """Moments are float32, unless `state_bits` or `bf16.bf16_optimizer_states` is set."""
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
    """How the iteration is computed: "gram" iterates on the product of a matrix with itself where that takes fewer
    operations."""
    ns_dtype: Literal["float32", "bfloat16"] | None = None
    """Element type of the iteration. null is float32 on the CPU and bfloat16 elsewhere. Weights of float64 have
    float64."""
    per_head_muon: bool = False
    """Orthogonalise each attention head of the projections of queries, keys and values alone."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Scale of an update, as in torch.optim.Muon: sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns)),
    whose size is AdamW's."""
    normuon_beta: Beta | None = None
    """Scale the rows of an update by averages of their squares, with this decay, as NorMuon (Li et al. 2025, which has
    0.95); the update keeps its size. null scales none. Refused for JAX, and where tensor ranks gather matrices."""
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


class ScheduleFreeAdamWParams(Section):
    """AdamW that needs no end of the training (Defazio et al. 2024). `engine.averaged_weights()` has the weights to
    evaluate. A learning-rate schedule with it is an error."""

    lr: NonNegativeFloat = 2.5e-3
    """Learning rate, constant after the warmup."""
    betas: Listed[tuple[Annotated[float, Field(gt=0, lt=1)], Beta]] = (0.9, 0.999)
    """How far gradients are computed from the average, and the decay of the second moment."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates in which the learning rate rises to `lr`."""
    weight_lr_power: NonNegativeFloat = 2.0
    """Weights in the average are learning rates to this power, in the warmup."""


class SophiaParams(Section):
    """Sophia (Liu et al. 2023), with squared gradients as the estimate of the diagonal Hessian."""

    lr: NonNegativeFloat = 1e-4
    """Learning rate."""
    betas: Betas = (0.965, 0.99)
    """Decay of the average and of the Hessian."""
    rho: PositiveFloat = 0.04
    """Factor of the Hessian. A larger one clips less."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    bs: PositiveFloat = 5120.0
    """Samples in a batch, tokens in a language model's, by which squared mean gradients become a Hessian."""
    hessian_interval: Annotated[int, Field(ge=1)] = 10
    """Updates between two estimates of the Hessian."""


class CameParams(Section):
    """CAME (Luo et al. 2023) on whole parameters."""

    lr: NonNegativeFloat = 2e-4
    """Learning rate."""
    betas: Listed[tuple[Beta, Beta, Beta]] = (0.9, 0.999, 0.9999)
    """Decay of the average, of the second moment and of the residual."""
    eps: Listed[tuple[PositiveFloat, PositiveFloat]] = (1e-30, 1e-16)
    """Added to squares of gradients and of residuals."""
    clip_threshold: PositiveFloat = 1.0
    """The largest root mean square of an update before it is averaged."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""


class ShampooParams(Section):
    """Shampoo (Gupta et al. 2018) on whole matrices, with Adagrad for the rest."""

    lr: NonNegativeFloat = 0.1
    """Learning rate."""
    momentum: Beta = 0.0
    """Momentum of preconditioned gradients."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    eps: PositiveFloat = 1e-4
    """The diagonal with which preconditioners begin."""
    precondition_frequency: Annotated[int, Field(ge=1)] = 1
    """Updates between two computations of the roots."""
    max_precond_dim: Annotated[int, Field(ge=1)] = 10_000
    """A longer side of a matrix has no preconditioner."""


class SoapParams(Section):
    """SOAP (Vyas et al. 2024) on whole matrices, with AdamW for the rest."""

    lr: NonNegativeFloat = 3e-3
    """Learning rate."""
    betas: Betas = (0.95, 0.95)
    """Decay of the two moments."""
    shampoo_beta: Beta | None = None
    """Decay of the preconditioners; null is the second of `betas`."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    precondition_frequency: Annotated[int, Field(ge=1)] = 10
    """Updates between two changes of the eigenvectors."""
    max_precond_dim: Annotated[int, Field(ge=1)] = 10_000
    """A longer side of a matrix has no preconditioner."""


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
    "ScheduleFreeAdamW": ScheduleFreeAdamWParams,
    "Sophia": SophiaParams,
    "CAME": CameParams,
    "Shampoo": ShampooParams,
    "SOAP": SoapParams,
}
"""The optimizers whose parameters we check, by the name that a `ResolvedConfig` uses for them."""
