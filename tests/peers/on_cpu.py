"""Run a script of transformers or TRL on CPU ranks: `python on_cpu.py SCRIPT ARGUMENTS`.

TRL loads a model onto the device of each rank, and where it counts several CPU processes as no distributed training,
by a `device_map`. With stage 3 transformers refuses that one. `TrainingArguments` takes bf16 on a CPU with `use_cpu`,
but then leaves the start of ranks to others than DeepSpeed: scripts of transformers pass its question about GPUs.
"""

import runpy
import sys
from typing import Any

import transformers

_load: Any = transformers.PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]


def _without_map(cls: Any, /, *args: Any, device_map: Any = None, **options: Any) -> Any:
    return _load(cls, *args, **options)


if __name__ == "__main__":
    transformers.PreTrainedModel.from_pretrained = classmethod(_without_map)  # type: ignore[assignment]
    arguments = sys.argv[1:]
    at = next(at for at, part in enumerate(arguments) if part.endswith(".py"))
    sys.argv = [arguments[at], *arguments[:at], *arguments[at + 1 :]]  # DeepSpeed's launcher puts --local_rank first
    if sys.argv[0].startswith("trl/"):
        sys.argv.append("--use_cpu")
    else:
        home: Any = transformers.training_args
        home.is_torch_bf16_gpu_available = lambda: True
    runpy.run_path(sys.argv[0], run_name="__main__")
