"""The forward passes of a module, and those of its parts that are recomputed, under the exact mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.ops.base import GROUPED_LINEAR
from polyaccel.torch.exact.mode import ExactMode
from polyaccel.torch.exact.operations import ExactOperations


class ExactForward:
    """Runs forward passes of `module` and of its parts under `ExactMode`, until `release`.

    [Note: Exact recomputation]
    Every part enters the mode, not the module alone: a checkpoint calls a part again in the backward pass, which a
    script may run itself. Gradients themselves are torch's, for they add up over the batch in any case.

    Raises ConfigError if the accelerator has no product whose rows are independent of the batch.
    """

    def __init__(self, module: nn.Module, accelerator: Accelerator) -> None:
        table = accelerator.matrix_kernels("auto")
        if GROUPED_LINEAR not in table:
            expected = f"needs a product whose rows do not depend on others, which {accelerator.name} has none of"
            hint = "leave it out, or train on an accelerator whose plugin registers the kernel grouped_linear"
            raise ConfigError([Problem("generation.exact", True, expected, hint)])
        self._operations = ExactOperations(table[GROUPED_LINEAR])
        self._inside: list[nn.Module] = []
        self._mode: ExactMode | None = None
        self._hooks: list[RemovableHandle] = []
        for part in module.modules():
            self._hooks.append(part.register_forward_pre_hook(self._enter))
            self._hooks.append(part.register_forward_hook(self._leave, prepend=True, always_call=True))

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, part: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            kind = type(part).__name__
            hint = 'leave torch.compile or "generation": {"exact": true} out'
            raise PolyaccelError(f"a compiled {kind} has other kernels than exact ones", hint=hint, value=kind)
        if not self._inside:
            self._mode = ExactMode(self._operations)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._inside.append(part)

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        """End the pass of `part`, which may have failed before it began."""
        if self._inside and self._inside[-1] is part:
            self._inside.pop()
            if not self._inside and self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._mode = None
