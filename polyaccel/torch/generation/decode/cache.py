"""Keys and values of sequences: in pages that they get as they grow, or in tensors of their full length.

[Note: Pages of a decoder]
Compiled attention reads pages ([Note: Pages of keys and values] in csrc/decode/attention.h). A page has the keys and
values of all layers for `tokens` tokens of one sequence. Pages are allocated some at a time, and one that a sequence
gives back is the next one's. So memory follows the tokens that are there, not the longest sequence times the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.ops.decode import LayerPages

PAGE_TOKENS = 32
_GROWTH = 8


class PagedCache:
    """Pages for `slots` sequences of at most `capacity` tokens, on the host. See [Note: Pages of a decoder]."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        *,
        tokens: int = PAGE_TOKENS,
    ) -> None:
        layers, key_heads, head = shape
        self._shape = (layers, 2, key_heads, tokens, head)
        self._dtype, self._tokens = dtype, tokens
        self._table = torch.zeros(slots, -(-capacity // tokens), dtype=torch.int64)
        self._held: list[list[Tensor]] = [[] for _ in range(slots)]
        self._free: list[Tensor] = []
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free ones too."""
        return self._count * torch.Size(self._shape).numel() * self._dtype.itemsize

    def layer(self, index: int) -> LayerPages:
        """Return where a layer's keys and values are."""
        _, _, key_heads, tokens, head = self._shape
        numel = key_heads * tokens * head
        return LayerPages(self._table, tokens, key_heads, head, self._dtype, 2 * index * numel, (2 * index + 1) * numel)

    def extend(self, slot: int, length: int) -> None:
        """Let a sequence have pages for `length` tokens."""
        held = self._held[slot]
        missing = -(-length // self._tokens) - len(held)
        if missing <= 0:
            return
        if missing > len(self._free):
            count = max(missing - len(self._free), self._count // _GROWTH)
            self._free += torch.empty(count, *self._shape, dtype=self._dtype).unbind()
            self._count += count
        for _ in range(missing):
            page = self._free.pop()
            self._table[slot, len(held)] = page.data_ptr()
            held.append(page)

    def release(self, slot: int) -> None:
        """Take back the pages of a sequence."""
        self._free += self._held[slot]
        self._held[slot] = []
        self._table[slot] = 0

    def write(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Write the first keys and values (key heads, tokens, head) of a sequence."""
        parts = (torch.split(one, self._tokens, 1) for one in (keys, values))
        for page, key, value in zip(self._held[slot], *parts, strict=False):
            page[layer, 0, :, : key.shape[1]] = key
            page[layer, 1, :, : key.shape[1]] = value


class StaticCache:
    """Tensors of the full length, for attention by the framework."""

    def __init__(self, shape: tuple[int, int, int], slots: int, capacity: int, like: Tensor) -> None:
        layers, key_heads, head = shape
        # What is masked is multiplied too, by zero: it must not be a NaN.
        both = like.new_zeros(2, layers, slots, key_heads, capacity, head)
        self.keys, self.values = both.unbind()

    def extend(self, slot: int, length: int) -> None:
        """Do nothing: the memory is there."""

    def release(self, slot: int) -> None:
        """Do nothing: the next sequence writes over it."""

    def write(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Write the first keys and values (key heads, tokens, head) of a sequence."""
        self.keys[layer, slot, :, : keys.shape[1]] = keys
        self.values[layer, slot, :, : keys.shape[1]] = values
