"""The steps of an engine in which weights lose bits by the curvature of their blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.compression import CompressionPolicy, Curvature, WeightRule
from polyaccel.errors import Problem
from polyaccel.torch.compression.curvature import eigenvalues, factors
from polyaccel.torch.compression.pace import BitPace

_log = logging.getLogger(__name__)


_KEY = "eigenvalue"


def pace_of(name: str, layer: nn.Module, rule: WeightRule | None, policy: CompressionPolicy) -> BitPace | None:
    """Return when the weight of a layer loses bits; None where that is a function of the step alone."""
    if rule is None or policy.curvature is None or not rule.doubles or not rule.period:
        return None
    prefix = f"{policy.curvature.blocks}."
    number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
    block = int(number) if number.isdecimal() and int(number) < policy.curvature.count else None
    return BitPace(layer, rule, block)


def curvature_problems(policy: CompressionPolicy, modules: Mapping[str, nn.Module]) -> list[Problem]:
    """Return what is wrong with the section `eigenvalue` for a model."""
    curvature = policy.curvature
    if curvature is None:
        return []
    if not any(rule.doubles and rule.period for rule in policy.weights):
        hint = "set period_doubling in weight_quantization, or leave it out"
        return [Problem(f"{_KEY}.enabled", True, "delays no weight's loss of bits", hint)]
    blocks = modules.get(curvature.blocks)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        return [Problem(f"{_KEY}.layer_name", curvature.blocks, "names no list of blocks", "give its full name")]
    if len(blocks) < curvature.count:
        expected = f"is more than the {len(blocks)} blocks of {curvature.blocks!r}"
        return [Problem(f"{_KEY}.layer_num", curvature.count, expected, f"use {len(blocks)}")]
    return []


class _PlainAttention:
    """torch's choice of attention kernels is one for a process: the first of ranks that are threads changes it, and the
    last one changes it back."""

    def __init__(self) -> None:
        self._lock, self._users, self._choice = Lock(), 0, ExitStack()

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Inside, attention is computed by operations that can be differentiated twice."""
        with self._lock:
            if not self._users:
                self._choice.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._choice.close()


_ATTENTION = _PlainAttention()


class BitsByCurvature:
    """Calls of an engine's step. `steps` gives the optimizer steps that are done, `ends_step` whether the next backward
    pass is the last of a step, and `ranks` are those with their own batches. See [Note: Bits by curvature]."""

    def __init__(
        self,
        paces: Sequence[BitPace],
        blocks: Sequence[nn.Module],
        policy: Curvature,
        *,
        steps: Callable[[], int],
        ends_step: Callable[[], bool],
        ranks: Communicator,
    ) -> None:
        self._paces, self._policy, self._ranks = list(paces), policy, ranks
        self._blocks = [list(block.parameters()) for block in blocks]
        self._steps, self._ends_step = steps, ends_step
        self._found: list[int] | None = None
        self._in_forward = ExitStack()

    def before_forward(self) -> None:
        """Let attention be computed by operations that can be differentiated twice, where that will be done."""
        self._in_forward.close()
        if self._is_due():
            self._in_forward.enter_context(_ATTENTION.chosen())

    def before_backward(self, loss: Tensor) -> None:
        """Find the factor of each block, where a weight is about to lose a bit. Collective then."""
        self._in_forward.close()
        if not self._is_due():
            return
        with torch.enable_grad():
            found = eigenvalues(loss, self._blocks, self._policy, self._ranks)
        self._found = factors(found)
        if self._policy.is_logged and self._ranks.rank == 0:
            _log.info("eigenvalues of blocks in step %d: %s; factors %s", self._steps() + 1, found, self._found)

    def after_step(self, loss: float | None) -> None:
        """Let the weights lose a bit whose step has come. A step that an overflow skipped is none."""
        self._in_forward.close()
        done, found, self._found = self._steps(), self._found, None
        for pace in self._paces:
            if pace.is_due(done):
                pace.lose(1 if pace.block is None else None if found is None else found[pace.block])

    def _is_due(self) -> bool:
        following = self._steps() + 1
        return (
            self._ends_step()
            and following % self._policy.every == 0
            and any(pace.is_due(following) for pace in self._paces)
        )
