"""Batches that grow with the samples that were seen: Megatron-LM's `--rampup-batch-size`.

The idea is that of Smith et al. 2018 (arXiv 1711.00489). The formula and its three numbers are those of Megatron-LM, as
GPT-3 was trained (Brown et al. 2020, arXiv 2005.14165, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.errors import ConfigError, Problem

KEY = "rampup_batch_size"


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Samples of a step that grow from `start` to `target` by `increment` over the first `samples` samples."""

    start: int
    increment: int
    samples: int
    target: int

    def at(self, seen: int) -> int:
        """Return the samples of the next step once `seen` were trained on."""
        if seen > self.samples:
            return self.target
        increments = (self.target - self.start) // self.increment
        grown = seen * increments // self.samples if increments else 0
        return self.start + min(grown, increments) * self.increment

    def require(self, each: int) -> None:
        """Raise ConfigError unless each step is whole micro-batches, of `each` samples on all ranks together."""
        numbers, problems = [self.start, self.increment, self.samples], []
        if self.start > self.target or (self.target - self.start) % self.increment:
            expected = f"does not lead in whole increments to train_batch_size = {self.target}"
            problems.append(Problem(KEY, numbers, expected, "use [start, increment, samples]"))
        if self.start % each or self.increment % each:
            expected = f"should have multiples of micro-batch size * data-parallel ranks = {each}"
            problems.append(Problem(KEY, numbers, expected, f"begin with {each}, for example"))
        if problems:
            raise ConfigError(problems)
