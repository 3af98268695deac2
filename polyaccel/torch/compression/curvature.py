"""The largest eigenvalue of each block's Hessian, by power iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyaccel.comm.base import Communicator
from polyaccel.core.types import ReduceOp
from polyaccel.engine.policies.compression import Curvature

_LEVELS = 4
"""Factors are 1 to 5: DeepSpeed's."""
_FLOAT16_SCALE = 128.0
"""Keeps small second derivatives in float16, and eigenvalues to 500."""


def eigenvalues(
    loss: Tensor, blocks: Sequence[Sequence[Tensor]], policy: Curvature, ranks: Communicator | None
) -> list[float]:
    """Return, for the parameters of each block, the eigenvalue of largest magnitude of the Hessian of the mean `loss`
    over `ranks`. Collective.

    Power iteration (Golub and Van Loan, Matrix Computations, section 7.3) over products by differentiation (Pearlmutter
    1994). First vectors are a function of the block's number. A block without curvature has 0.
    """
    return [_eigenvalue(loss, number, block, policy, ranks) for number, block in enumerate(blocks)]


def factors(found: Sequence[float]) -> list[int]:
    """Return what multiplies the periods of each block: 1 and a part of 4 that is its share of the largest eigenvalue.

    A block whose eigenvalue is 0, or could not be computed, counts as the largest, as in DeepSpeed.
    """
    most = max((abs(one) for one in found), default=0.0)
    return [1 + int(_LEVELS * (abs(one) / most if one else 1.0)) for one in found]


def _eigenvalue(
    loss: Tensor, number: int, block: Sequence[Tensor], policy: Curvature, ranks: Communicator | None
) -> float:
    parameters = [one for one in block if one.requires_grad]
    scale = _FLOAT16_SCALE if any(one.dtype == torch.float16 for one in parameters) else 1.0
    grads = torch.autograd.grad(loss * scale, parameters, create_graph=True, retain_graph=True, allow_unused=True)
    pairs = [
        (one, grad) for one, grad in zip(parameters, grads, strict=True) if grad is not None and grad.requires_grad
    ]
    generator = torch.Generator().manual_seed(number)
    drawn = [torch.randn(one.shape, generator=generator, dtype=torch.float32) for one in parameters]
    used = {id(one) for one, _ in pairs}
    vector = [
        v.to(one.device) if id(one) in used else torch.zeros_like(one) for v, one in zip(drawn, parameters, strict=True)
    ]
    flat = _normalised(torch.cat([one.reshape(-1).to(_wide(one)) for one in vector]), policy.stability)
    now, before = 1.0, 0.0
    for _ in range(policy.iterations):
        if now == 0.0 or abs((now - before) / now) < policy.tolerance:
            break
        product = _product(pairs, parameters, flat) / scale
        if ranks is not None and ranks.world_size > 1:
            ranks.all_reduce(ranks.accelerator.wrap(product), ReduceOp.AVG, label="curvature")
        product = product.nan_to_num(0.0, 0.0, 0.0)
        before, now = now, float(product @ flat)
        flat = _normalised(product, policy.stability)
    return now


def _product(pairs: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Return the block's Hessian times a flat vector."""
    parts = dict(zip(map(id, parameters), torch.split(flat, [one.numel() for one in parameters]), strict=True))
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if pairs:
        outputs = [parts[id(one)].view_as(one).to(grad.dtype) for one, grad in pairs]
        found = torch.autograd.grad(
            [grad for _, grad in pairs], list(parameters), outputs, retain_graph=True, allow_unused=True
        )
    filled = [torch.zeros_like(one) if part is None else part for one, part in zip(parameters, found, strict=True)]
    return torch.cat([one.reshape(-1).to(flat.dtype) for one in filled])


def _normalised(flat: Tensor, stability: float) -> Tensor:
    found: Tensor = flat / (flat.norm() + stability)
    return found.nan_to_num(0.0, 0.0, 0.0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
