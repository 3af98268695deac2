"""Layouts of block-sparse attention: which blocks of keys each block of queries sees.

Sparse Transformers (Child et al. 2019, arXiv 1904.10509), BigBird (Zaheer et al. 2020, arXiv 2007.14062) and Longformer
(Beltagy et al. 2020, arXiv 2004.05150), by blocks, with DeepSpeed's keys and values as of 0.19.5.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from polyaccel.errors import ConfigError, Problem

_KEY = "sparse_attention"
ONE_WAY, BOTH_WAYS = "unidirectional", "bidirectional"


@dataclass(frozen=True, kw_only=True)
class BlockPattern:
    """Which blocks of keys the blocks of queries see, by DeepSpeed's keys of `sparse_attention`.

    Attributes:
        mode: "dense", "fixed", "variable", "bigbird", "bslongformer" or "local".
        block: Tokens of a block.
        different_layout_per_head: Draw random blocks, and choose global ones, for each head.
        num_local_blocks: Blocks of a local window, of "fixed".
        num_global_blocks: Global blocks of each window of "fixed"; of "bigbird" the first blocks.
        num_different_global_patterns: Choices of global blocks that heads take in turn, of "fixed".
        horizontal_global_attention: Global blocks see all others, of "fixed" and "variable".
        num_random_blocks: Random blocks of each block of queries, of "variable" and "bigbird"; None is 1 for "bigbird".
        local_window_blocks: Blocks of each local window, the last for all that follow, of "variable".
        num_sliding_window_blocks: Blocks of the window around each one, of "bigbird", "bslongformer" and "local".
        global_block_indices: Global blocks, of "variable" and "bslongformer".
        global_block_end_indices: Where each range of global blocks ends that begins there; None for single blocks.
        attention: "bidirectional", or "unidirectional": no block sees a later one. None is the latter for "local".
        seed: Seed of random blocks.

    Raises:
        ConfigError: Values do not fit each other.
    """

    mode: str = "fixed"
    block: int = 16
    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    num_different_global_patterns: int = 1
    horizontal_global_attention: bool = False
    num_random_blocks: int | None = None
    local_window_blocks: tuple[int, ...] = (4,)
    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.attention is None:
            object.__setattr__(self, "attention", ONE_WAY if self.mode == "local" else BOTH_WAYS)
        if self.num_random_blocks is None:
            object.__setattr__(self, "num_random_blocks", int(self.mode == "bigbird"))
        ends = self.global_block_end_indices
        ranges = zip(self.global_block_indices, ends or (), strict=False)
        wrong = {
            "mode": self.mode not in _RULES,
            "block": self.block < 1,
            "attention": self.attention not in (ONE_WAY, BOTH_WAYS),
            "num_global_blocks": self.mode == "fixed" and self.num_local_blocks % max(1, self.num_global_blocks) != 0,
            "horizontal_global_attention": self.horizontal_global_attention and self.attention != BOTH_WAYS,
            "num_different_global_patterns": self.num_different_global_patterns
            > (self.num_local_blocks // max(1, self.num_global_blocks) if self.different_layout_per_head else 1),
            "global_block_end_indices": ends is not None
            and (len(ends) != len(self.global_block_indices) or any(begin >= end for begin, end in ranges)),
            "local_window_blocks": not self.local_window_blocks or min(self.local_window_blocks) < 1,
        }
        problems = [
            Problem(f"{_KEY}.{name}", getattr(self, name), "does not fit the other values", "see docs/guide")
            for name, is_wrong in wrong.items()
            if is_wrong
        ]
        if problems:
            raise ConfigError(problems, source=_KEY)

    def layout(self, heads: int, length: int) -> Tensor:
        """Return the layout of sequences of `length` tokens, (heads, blocks, blocks), boolean.

        Args:
            heads: Attention heads.
            length: Tokens of a sequence, a multiple of `block`.

        Returns:
            Whether a block of queries (second dimension) sees a block of keys (third).

        Raises:
            ConfigError: The sequence is not of whole blocks, or has fewer than the window or the random blocks.
        """
        blocks, rest = divmod(length, self.block)
        drawn = self.num_random_blocks or 0
        uses = {"bigbird": max(drawn, self.num_global_blocks), "variable": drawn}
        least = uses.get(self.mode, 0)
        if self.mode in ("bigbird", "bslongformer", "local"):
            least = max(least, self.num_sliding_window_blocks)
        if rest or not blocks or blocks < least:
            expected = f"needs sequences of at least {max(1, least)} whole blocks, and this one has {length} tokens"
            raise ConfigError([Problem(f"{_KEY}.block", self.block, expected, "pad the sequence")], source=_KEY)
        found = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
        own = heads if self.different_layout_per_head else 1
        draws = random.Random(self.seed)
        for head in range(own):
            for rule in _RULES[self.mode]:
                rule(self, found[head], head, draws)
        found[own:] = found[0]
        return found


Rule = Callable[[BlockPattern, Tensor, int, random.Random], None]
"""Sets blocks of the layout of one head."""


def _all(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    layout.fill_(True)


def _windows(pattern: BlockPattern, layout: Tensor, widths: tuple[int, ...]) -> None:
    """Local windows of these widths, the last of them again and again."""
    borders = [0]
    for number in range(len(layout)):
        borders.append(borders[-1] + widths[min(number, len(widths) - 1)])
    for begin, end in pairwise(borders):
        window = layout[begin:end, begin:end]
        window |= torch.ones_like(window).tril() if pattern.attention == ONE_WAY else torch.ones_like(window)


def _fixed_windows(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    _windows(pattern, layout, (pattern.num_local_blocks,))


def _variable_windows(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    _windows(pattern, layout, pattern.local_window_blocks)


def _fixed_globals(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    """The last blocks of each window, or others for other heads; those of a short last window may begin earlier."""
    window, count, blocks = pattern.num_local_blocks, pattern.num_global_blocks, len(layout)
    first = window - (1 + head % pattern.num_different_global_patterns) * count
    whole = blocks - blocks % window
    begins = list(range(first, whole, window))
    if whole < blocks:
        begins.append(min(whole + first, blocks - count))
    for begin in begins:
        _see(pattern, layout, begin, begin + count, rows=pattern.horizontal_global_attention)


def _listed_globals(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    ends = pattern.global_block_end_indices or [begin + 1 for begin in pattern.global_block_indices]
    is_longformer = pattern.mode == "bslongformer"
    for begin, end in zip(pattern.global_block_indices, ends, strict=True):
        if begin < len(layout):
            _see(pattern, layout, begin, end, rows=is_longformer or pattern.horizontal_global_attention)
    if is_longformer:
        _only_earlier(pattern, layout)


def _see(pattern: BlockPattern, layout: Tensor, begin: int, end: int, *, rows: bool) -> None:
    """Let all blocks see these, from their row on where attention is one way; with `rows` these see all."""
    layout[0 if pattern.attention == BOTH_WAYS else begin :, begin:end] = True
    if rows:
        layout[begin:end] = True


def _random(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    is_early = pattern.mode == "bigbird" and pattern.attention == ONE_WAY
    count = pattern.num_random_blocks or 0
    for row in range(len(layout)):
        seen = range(row + 1 if is_early else len(layout))
        layout[row, draws.sample(seen, min(count, len(seen)))] = True


def _sliding(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    reach = pattern.num_sliding_window_blocks // 2
    rows = torch.arange(len(layout))
    near = (rows[:, None] - rows).abs() <= reach
    layout |= near.tril() if pattern.mode == "local" and pattern.attention == ONE_WAY else near


def _first_globals(pattern: BlockPattern, layout: Tensor, head: int, draws: random.Random) -> None:
    layout[: pattern.num_global_blocks] = True
    layout[:, : pattern.num_global_blocks] = True
    _only_earlier(pattern, layout)


def _only_earlier(pattern: BlockPattern, layout: Tensor) -> None:
    if pattern.attention == ONE_WAY:
        layout &= torch.ones_like(layout).tril()


_RULES: dict[str, tuple[Rule, ...]] = {
    "dense": (_all,),
    "fixed": (_fixed_windows, _fixed_globals),
    "variable": (_random, _variable_windows, _listed_globals),
    "bigbird": (_random, _sliding, _first_globals),
    "bslongformer": (_sliding, _listed_globals),
    "local": (_sliding,),
}
"""What sets the blocks of each mode, one after the other."""
