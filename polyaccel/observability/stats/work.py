"""The work of a step: tokens, and the floating-point operations of the model."""

from __future__ import annotations

from collections.abc import Callable

BACKWARD_FACTOR = 2
"""A backward pass has as many operations as two forward passes: a product for each operand of a product."""


class WorkCounter:
    """Counts what this rank's micro-batches ask of the model, until a step takes it.

    Operations are the model's: those of a forward pass, and twice as many for its backward. What is computed again
    because activations were not kept is not progress, and not counted.
    """

    def __init__(self, *, enabled: bool, streams_of_batches: int) -> None:
        """`streams_of_batches`: how many ranks have their own batches."""
        self.enabled = enabled
        self.streams_of_batches = streams_of_batches
        self.ranks_here = 1
        """Ranks whose work this process counts."""
        self.measure_peak: Callable[[], float | None] = lambda: None
        """Operations a second of the device, measured with a large product; None where it cannot be measured."""
        self._tokens = 0
        self._operations = 0.0
        self._peak: float | None = None
        self._knows_peak = False

    def add(self, tokens: int, forward_operations: float) -> None:
        """Count a micro-batch that is trained on."""
        self._tokens += tokens
        self._operations += forward_operations * (1 + BACKWARD_FACTOR)

    def needs_peak(self) -> bool:
        """Whether `know_peak` is due, which takes a moment."""
        return self.enabled and not self._knows_peak and self._operations > 0

    def know_peak(self) -> None:
        """Measure the device, once."""
        self._knows_peak = True
        self._peak = self.measure_peak()

    def take(self, seconds: float) -> dict[str, float]:
        """The figures of a step of so many seconds, by the names of `StepMetrics`; those that were not counted are left
        out."""
        tokens, operations = self._tokens, self._operations
        self._tokens, self._operations = 0, 0.0
        found: dict[str, float] = {}
        if tokens:
            found["tokens_per_s"] = tokens * self.streams_of_batches / seconds
        if operations:
            a_rank = operations / self.ranks_here / seconds
            found["tflops"] = a_rank / 1e12
            if self._peak is not None:
                found["model_flops_utilisation"] = a_rank / self._peak
        return found
