"""A job for the tests: a function of JAX on this machine's device, in views and native execution, next to float64."""

from __future__ import annotations

import os
import sys
import traceback

import jax

import polyaccel
from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.testkit.comparison import same_numbers
from polyaccel.testkit.training.jax_training import _train
from polyaccel.testkit.training.numpy_training import train_plainly


def main() -> int:
    """Train at every stage in both executions."""
    failed = 0
    print(jax.devices())
    for name in (os.environ["DS_ACCELERATOR"], jax.default_backend()):
        try:
            accelerator = choose_accelerator(name)
            print(name, type(accelerator).__name__, accelerator.capabilities(), accelerator.memory_stats(), flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    _, expected = train_plainly(1, 1, 5, 0.5)
    on_host = choose_accelerator(os.environ["DS_ACCELERATOR"]).works_on_host_memory
    for is_native in (True, False):
        for stage in range(4 if on_host and not is_native else 3):
            try:
                found = _train(stage, is_native, [0])
                same_numbers(found, expected, f"native {is_native} stage {stage}", rtol=1e-4)
                print(f"native {is_native} stage {stage}: right", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED native {is_native} stage {stage}: {error}\n{traceback.format_exc()}", flush=True)
    polyaccel.comm.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
