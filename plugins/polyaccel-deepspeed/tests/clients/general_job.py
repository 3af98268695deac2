"""One of Accelerate's packaged test scripts that are about no client in particular, as a job under DeepSpeed.

`general_job.py NAME`, with ranks over gloo. `test_script` and `test_sync` leave parts out under DeepSpeed, which are
run here where they ask what an engine can answer. Changed are:

- `test_script`, trainings in bf16 and fp16: an engine's parameters have that type then, and the script wants those of
  a training in float32.
- `test_sync`: an engine's gradients are reduced and forgotten by the step that Accelerate takes within `backward`, so
  the script's comparison gets those that the step saw.
- `test_distributed_data_loop`: Accelerate's own `join_uneven_inputs` does nothing under DeepSpeed but warn, so the
  three parts about what it overrides are left out; and its class of a DeepSpeed config, which the script compares with
  a copy that was pickled, compares by contents.

Its last words are `whole: NAME`, and in between it prints what of `test_sync` was done.
"""

from __future__ import annotations

import itertools
import sys
from importlib import import_module
from typing import Any

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from packaged_job import SCRIPTS, meet_over_gloo

OVERRIDES = (
    "test_join_can_override_even_batches",
    "test_join_can_override_for_mixed_type_dataloaders",
    "test_join_raises_warning_for_iterable_when_overriding_even_batches",
)
"""Parts of `test_distributed_data_loop` about Accelerate's join, which is for DistributedDataParallel."""


def script_job(script: Any) -> None:
    """All of `test_script`: what it leaves out under DeepSpeed comes after what it does."""
    script.main()
    script.is_bf16_available = script.is_fp16_available = lambda: False
    for is_seedable in (False, True):
        script.training_check(use_seedable_sampler=is_seedable)
    script.test_trigger()
    script.test_reinstantiated_state()


class StepGradients:
    """Whole gradients that an engine's updates were made with, by the parameters' ids, until they are compared."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.Tensor] = {}

    def watch(self) -> None:
        import deepspeed

        step = deepspeed.DeepSpeedEngine.step

        def watched(engine: Any, *given: Any, **named: Any) -> Any:
            for parameter in engine.module.parameters():
                self._seen[id(parameter)] = deepspeed.utils.safe_get_full_grad(parameter)
            return step(engine, *given, **named)

        deepspeed.DeepSpeedEngine.step = watched

    def compare(self, model: Any, engine: Any, did_step: bool, iteration: int, **tolerance: float) -> None:
        """In place of the script's `check_model_parameters`."""
        for parameter, other in zip(model.parameters(), engine.parameters(), strict=True):
            assert (id(other) in self._seen) is did_step, iteration
            if did_step:
                torch.testing.assert_close(self._seen.pop(id(other)), parameter.grad, atol=1e-6, **tolerance)


def sync_job(script: Any) -> None:
    """`test_sync`, and its accumulation with loaders that split batches and that have one rank read for all."""
    gradients = StepGradients()
    gradients.watch()
    script.check_model_parameters = gradients.compare
    test = script.test_gradient_accumulation_with_opt_and_scheduler

    def thorough() -> None:
        for splits, dispatches in itertools.product((False, True), repeat=2):
            test(split_batches=splits, dispatch_batches=dispatches)
            print(f"accumulated, splits={splits}, dispatches={dispatches}", flush=True)

    script.test_gradient_accumulation_with_opt_and_scheduler = thorough
    script.main()


def loop_job(script: Any) -> None:
    """`test_distributed_data_loop` without what Accelerate's join overrides."""
    HfDeepSpeedConfig.__eq__ = lambda self, other: self.config == other.config  # type: ignore[method-assign]
    for name in OVERRIDES:
        setattr(script, name, lambda: None)
    script.main()


JOBS = {"test_script": script_job, "test_sync": sync_job, "test_distributed_data_loop": loop_job}


def main() -> None:
    name = sys.argv.pop(1)
    meet_over_gloo()
    script = import_module(f"{SCRIPTS}.{name}")
    if name in JOBS:
        JOBS[name](script)
    else:
        script.main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print(f"whole: {name}", flush=True)


if __name__ == "__main__":
    main()
