"""Groups of samples that hold about equally many tokens, as in Vaswani et al. 2017 (arXiv 1706.03762, section 5.1).

A group is one after another of the samples in their order, as many as fit. Groups of a step are one batch, whose
learning rate follows the number of its samples: linearly (Goyal et al. 2017, arXiv 1706.02677), by the square root
(Krizhevsky 2014, arXiv 1404.5997), or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyaccel.errors import PolyaccelError

LR_SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": sqrt, "none": lambda ratio: 1.0}
"""What a batch `ratio` times as large makes of the learning rate, by method."""
ORDERS = ("dataloader", "random", "seqlen")
"""Orders in which samples are put into groups: theirs, drawn, or by rising length."""


@dataclass(frozen=True, slots=True)
class TokenBatches:
    """Groups of sample numbers.

    Attributes:
        samples: Sample numbers of all groups, one group after the other.
        ends: Where each group ends among `samples`.
        per_batch: Groups of a batch.
        left_out: Samples that no group has.
    """

    samples: NDArray[np.int64]
    ends: NDArray[np.int64]
    per_batch: int
    left_out: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of groups, a multiple of `per_batch`."""
        return len(self.ends)

    def __getitem__(self, group: int) -> NDArray[np.int64]:
        """Return the sample numbers of a group."""
        return self.samples[self.ends[group - 1] if group else 0 : self.ends[group]]

    def batch_sizes(self) -> NDArray[np.int64]:
        """Return the number of samples of each batch."""
        ends = self.ends[self.per_batch - 1 :: self.per_batch]
        return np.diff(ends, prepend=0)


def group_by_tokens(
    lengths: ArrayLike,
    *,
    max_tokens: int,
    per_batch: int = 1,
    least: int = 1,
    most: int | None = None,
    order: str = "dataloader",
    seed: int | None = None,
) -> TokenBatches:
    """Put samples into groups of at most `max_tokens` tokens.

    Each group takes the next samples as long as they fit. A sample that is longer than `max_tokens` is left out. So is
    the first of samples of which fewer than `least` fit together, and what makes no whole batch at the end.

    Args:
        lengths: Tokens of each sample.
        max_tokens: Most tokens of a group.
        per_batch: Groups of an optimizer step, on all ranks.
        least: Fewest samples of a group.
        most: Most samples of a group; None does not limit them.
        order: One of `ORDERS`.
        seed: Seed of the order "random".

    Returns:
        The groups.

    Raises:
        PolyaccelError: A length is not a count, or the samples make no batch.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (len(sizes) and int(sizes.min()) < 0):
        hint = "give one integer for each sample, from 0"
        raise PolyaccelError(f"lengths of samples are {sizes.dtype} of shape {sizes.shape}", hint=hint, value=lengths)
    sizes = sizes.astype(np.int64)
    wanted = _ordered(sizes, order, seed)
    fitting = wanted[sizes[wanted] <= max_tokens]
    chosen, ends = _fill(fitting, sizes, max_tokens, least, len(fitting) if most is None else most)
    del ends[len(ends) - len(ends) % per_batch :]
    if not ends:
        raise PolyaccelError(
            f"{len(sizes)} samples do not make {per_batch} groups of {least} samples and {max_tokens} tokens",
            hint="give more data, raise max_tokens, or lower the batch size",
            value=len(sizes),
        )
    samples = np.array(chosen[: ends[-1]], np.int64)
    left_out = np.setdiff1d(np.arange(len(sizes)), samples)
    return TokenBatches(samples, np.array(ends, np.int64), per_batch, left_out)


def _ordered(sizes: NDArray[np.int64], order: str, seed: int | None) -> NDArray[np.int64]:
    if order == "seqlen":
        return np.argsort(sizes, kind="stable").astype(np.int64)
    numbers: list[Any] = list(range(len(sizes)))
    if order == "random":
        random.Random(seed).shuffle(numbers)
    return np.array(numbers, np.int64)


def _fill(
    wanted: NDArray[np.int64], sizes: NDArray[np.int64], max_tokens: int, least: int, most: int
) -> tuple[list[int], list[int]]:
    """The samples of all groups one after another, and where each group ends among them."""
    totals = np.concatenate([[0], np.cumsum(sizes[wanted])])
    chosen, ends, at = list[int](), list[int](), 0
    while at < len(wanted):
        end = int(np.searchsorted(totals, totals[at] + max_tokens, side="right")) - 1
        end = min(end, at + most, len(wanted))
        if end - at < least:
            at += 1
            continue
        chosen += wanted[at:end].tolist()
        ends.append(len(chosen))
        at = end
    return chosen, ends
