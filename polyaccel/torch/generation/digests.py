"""Checksums of parameters before and after a rollout: which ones generation has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyaccel.ops.native import crc32

_WORD_NBYTES = 4


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of each tensor's bits: a CRC-32 on the host, a sum that other devices compute themselves."""
    sums: dict[str, Any] = {}
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        sums[name] = crc32(flat.numpy().data) if flat.device.type == "cpu" else _sum_of_words(flat)
    elsewhere = {name: value for name, value in sums.items() if isinstance(value, Tensor)}
    if elsewhere:  # one copy to the host, not one a parameter
        sums.update(zip(elsewhere, torch.stack(list(elsewhere.values())).tolist(), strict=True))
    return sums


def _sum_of_words(flat: Tensor) -> Tensor:
    whole = flat.numel() // _WORD_NBYTES * _WORD_NBYTES
    return flat[:whole].view(torch.int32).sum(dtype=torch.int64) + flat[whole:].sum(dtype=torch.int64)


def changed_names(before: Mapping[str, int], after: Mapping[str, int]) -> Iterable[str]:
    """Return the names in both whose checksums differ, in order."""
    return [name for name, value in before.items() if name in after and after[name] != value]
