"""Training as users of JAX do it: a function, `polyaccel.initialize`, some steps at every stage that the device has.

A device whose arrays never change trains in native mode, all devices of the process together; one whose memory JAX sees
by views, a rank for each process, with stage 3 on the host. What is compared against is float64.
"""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import jax
import jax.numpy as jnp
import numpy as np

import polyaccel
from polyaccel.accelerators.detect import set_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.testkit.comparison import same_numbers
from polyaccel.testkit.progress import doing
from polyaccel.testkit.training.numpy_training import BETAS, EPS, LR, WEIGHT_DECAY, batch, initial, train_plainly

_STEPS = 5
_CLIP = 0.5
_ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


def check_jax_stages(communicator: Communicator) -> None:
    """Train at every stage: norms of gradients within rounding of float64's. Collective; AssertionError on every rank
    that sees otherwise."""
    accelerator = communicator.accelerator
    set_accelerator(accelerator)
    is_native = not accelerator.capabilities().mutable_buffers
    is_host = accelerator.works_on_host_memory
    if not is_native and not is_host and not _is_known(accelerator.torch_device_type or accelerator.name):
        raise SkipTest("JAX does not have the device")
    world = accelerator.device_count() if is_native else communicator.world_size
    ranks = range(world) if is_native else [communicator.rank]
    _, expected = train_plainly(world, 1, _STEPS, _CLIP)
    for stage in range(4) if is_host and not is_native else range(3):
        same_numbers(
            _train(stage, is_native, ranks), expected, f"gradient norms by step, JAX, stage {stage}", rtol=1e-4
        )


def _is_known(platform: str) -> bool:
    try:
        return bool(jax.local_devices(backend=platform))
    except (RuntimeError, AssertionError):
        return False


def _train(stage: int, is_native: bool, ranks: Any) -> list[float]:
    """The gradient norm of every step."""
    doing(f"training a function of JAX at stage {stage}")
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": _CLIP,
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "zero_optimization": {"stage": stage},
        "jax": {"execution": "native" if is_native else "views"},
    }
    params = {fqn: value for fqn, value in initial().items() if fqn != "idle"}
    engine: Any = polyaccel.initialize(model=_loss, params=params, config=config)
    norms = []
    with jax.default_matmul_precision("highest"):  # GPUs multiply float32 matrices in fewer bits otherwise
        for step in range(_STEPS):
            doing(f"step {step} of a function of JAX at stage {stage}")
            parts = [batch(step, 0, rank) for rank in ranks]
            inputs, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
            engine.train_batch((inputs, targets))
            norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return norms


def _loss(params: Any, micro_batch: Any, rng: Any) -> Any:
    """The loss of `numpy_training.gradients`."""
    inputs, targets = micro_batch
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.square(params["scale"] * (hidden @ params["w2"]) - targets).mean()
