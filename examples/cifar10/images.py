"""Labelled images: CIFAR-10 in its binary form, and the digits that come with scikit-learn.

Both give float32 images in [-1, 1], (number, channels, side, side), and int64 labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyaccel import PolyaccelError

_SIDE, _CHANNELS, _CLASSES = 32, 3, 10
_RECORD_NBYTES = 1 + _CHANNELS * _SIDE * _SIDE
_DIGITS_SIDE = 16
_DIGITS_MAX = 16.0


class Images(NamedTuple):
    """Images with their labels."""

    images: Tensor
    labels: Tensor


class Splits(NamedTuple):
    """What to train on and what to test on."""

    training: Images
    test: Images


def read_cifar10(folder: Path) -> Splits:
    """The files data_batch_*.bin and test_batch.bin of `folder`, in the layout of the "binary version".

    Raises PolyaccelError for files that are missing or not in that layout.
    """
    batches = sorted(folder.glob("data_batch_*.bin"))
    test = folder / "test_batch.bin"
    missing = [name for name, found in (("data_batch_*.bin", bool(batches)), (test.name, test.is_file())) if not found]
    if missing:
        hint = "give the folder cifar-10-batches-bin of the unpacked archive"
        raise PolyaccelError(f"{folder} has no {' and no '.join(missing)}", hint=hint, value=str(folder))
    parts = [_read_batch(file) for file in batches]
    training = Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    return Splits(training, _read_batch(test))


def _read_batch(file: Path) -> Images:
    """Records of one label byte and 3072 of a 32x32 image, all of red, then green, then blue."""
    data = np.fromfile(file, dtype=np.uint8)
    if data.size == 0 or data.size % _RECORD_NBYTES:
        raise PolyaccelError(
            f"{file} has {data.size} bytes, which is no whole number of {_RECORD_NBYTES}-byte records",
            hint="download it again: it is cut off, or not CIFAR-10's binary version",
            value=data.size,
        )
    records = torch.from_numpy(data.reshape(-1, _RECORD_NBYTES))
    labels = records[:, 0].long()
    if int(labels.max()) >= _CLASSES:
        found = int(labels.max())
        hint = "use CIFAR-10, not CIFAR-100, in its binary version"
        raise PolyaccelError(f"{file} has a label {found}, where 0 to 9 are possible", hint=hint, value=found)
    return Images(records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE).float() / 127.5 - 1.0, labels)


def load_digits() -> Splits:
    """scikit-learn's 1797 handwritten digits, enlarged from 8 to 16 pixels; every fifth is for testing."""
    from sklearn.datasets import load_digits as bundled_digits

    bundle = bundled_digits()
    small = torch.from_numpy(bundle.images.astype(np.float32))[:, None] / (_DIGITS_MAX / 2) - 1.0
    images = functional.interpolate(small, size=(_DIGITS_SIDE, _DIGITS_SIDE), mode="bilinear")
    labels = torch.from_numpy(bundle.target.astype(np.int64))
    is_test = torch.arange(len(labels)) % 5 == 4
    return Splits(Images(images[~is_test], labels[~is_test]), Images(images[is_test], labels[is_test]))
