"""Ten kinds of public scripts of JAX on engines: the numbers are those of plain jit and optax.

`TESTS_SCRIPTS=full` runs each at stages 0, 2 and 3 on one to three ranks, in views and in native mode; otherwise each
at one stage in each mode, so that every stage meets every number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("flax")

from jax_scripts import SCRIPTS, on_engine, plainly

from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads

IS_FULL = os.environ.get("TESTS_SCRIPTS") == "full"
WORLDS, STAGES = (1, 2, 3), (0, 2, 3)
WITHIN = 1e-6
"""Of a loss, and of an array's largest value."""


def cases() -> list[tuple[str, int, int | str]]:
    natively = [f"native {stage}" for stage in STAGES]
    if IS_FULL:
        return [(name, world, kind) for name in SCRIPTS for world in WORLDS for kind in (*STAGES, *natively)]
    own = [(name, WORLDS[(at + at // 3) % 3], STAGES[at % 3]) for at, name in enumerate(SCRIPTS)]
    return [*own, *((name, WORLDS[at % 3], natively[(at + at // 3) % 3]) for at, name in enumerate(SCRIPTS))]


def section(kind: int | str) -> dict[str, Any]:
    stage = kind if isinstance(kind, int) else int(kind.removeprefix("native "))
    persistence = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    native = {"jax": {"execution": "native"}} if isinstance(kind, str) else {}
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64, **persistence}, **native}


@pytest.mark.parametrize(("name", "world", "kind"), cases())
def test_a_script_has_the_numbers_of_plain_jax(
    name: str, world: int, kind: int | str, rank_pool: Callable[[int], RankPool]
) -> None:
    def run() -> Any:
        if isinstance(kind, str) and world > 1:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={world}"
            with RankPool(1, environ={"XLA_FLAGS": flags}) as pool:
                return pool.run(on_engine, name, section(kind), world, timeout_s=240.0)
        if kind == 3 and world > 1:  # threads of one process would share XLA's
            return rank_pool(world).run(on_engine, name, section(kind), timeout_s=240.0)
        return run_threads(world, on_engine, name, section(kind), timeout_s=240.0)

    losses, wanted = plainly(name, world)
    for found, leaves in run():
        np.testing.assert_allclose(found, losses, rtol=WITHIN)
        assert len(leaves) == len(wanted)
        for one, other in zip(leaves, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=WITHIN * max(1.0, float(np.abs(other).max())))
