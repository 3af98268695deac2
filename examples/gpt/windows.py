"""The corpus as a dataset of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The file's bytes in windows of `context`, side by side: (tokens, targets), int64, targets one byte later."""

    def __init__(self, file: Path, context: int) -> None:
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(file, dtype=np.uint8, mode="r")
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.context
        window = torch.from_numpy(self.bytes[begin : begin + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]
