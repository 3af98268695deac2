"""LoRA fused into frozen weights until it is undone, as DeepSpeed's hybrid engine does it around a rollout."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.generation.adapters import fused_adapters


class FusesAdapters:
    """The part of an engine that fuses adapters."""

    _own_module: nn.Module
    _fused: ExitStack | None = None

    def fuse_lora_weight(self) -> None:
        """Add adapters to their frozen weights, until `unfuse_lora_weight`. A second call does nothing.

        Raises PolyaccelError where weights are sharded.
        """
        if self.zero_optimization_partition_weights():  # type: ignore[attr-defined]  # of the engine
            hint = "use engine.generate(..., fuse_adapters=True), which gathers them first"
            raise PolyaccelError("adapters cannot be fused into sharded weights", hint=hint, value=3)
        if self._fused is None:
            self._fused = ExitStack()
            self._fused.enter_context(fused_adapters(self._own_module))

    def unfuse_lora_weight(self) -> None:
        """Give frozen weights the bits that they had."""
        if self._fused is not None:
            self._fused.close()
            self._fused = None

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """As `TorchEngine.backward`. Raises PolyaccelError while adapters are fused: they would get no gradients."""
        self.require_unfused("backward")
        done: Tensor = super().backward(loss, retain_graph, scale_wrt_gas)  # type: ignore[misc]  # of the engine
        return done

    def require_unfused(self, what: str) -> None:
        """Raise PolyaccelError while adapters are fused, for `what` needs frozen weights as they are."""
        if self._fused is not None:
            hint = "call unfuse_lora_weight first"
            raise PolyaccelError(f"{what} was called while adapters are fused", hint=hint, value=what)
