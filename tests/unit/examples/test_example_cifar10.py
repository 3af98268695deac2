"""The parts of examples/cifar10: both sources of images, the net, and the tutorial's config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_modules import example_modules

from polyaccel import PolyaccelError
from polyaccel.config import load_resolved


@pytest.fixture(scope="module")
def cifar10() -> Iterator[SimpleNamespace]:
    with example_modules("cifar10") as modules:
        yield modules


def record(label: int, red: int, green: int, blue: int) -> bytes:
    """An image of one colour, but for its first pixel, which is white."""
    planes = [bytes([255]) + bytes([value]) * 1023 for value in (red, green, blue)]
    return bytes([label]) + b"".join(planes)


def write_cifar10(folder: Path) -> None:
    (folder / "data_batch_1.bin").write_bytes(record(3, 255, 0, 0) + record(9, 0, 255, 0))
    (folder / "data_batch_2.bin").write_bytes(record(0, 0, 0, 255))
    (folder / "test_batch.bin").write_bytes(record(7, 51, 102, 204))


def test_cifar10_is_read_as_its_authors_lay_it_out(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    splits = cifar10.images.read_cifar10(tmp_path)
    assert splits.training.labels.tolist() == [3, 9, 0]
    assert splits.training.images.shape == (3, 3, 32, 32)
    assert splits.training.images.dtype is torch.float32
    colours = splits.training.images[:, :, 5, 5]
    assert colours.tolist() == [[1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    assert splits.training.images[0, :, 0, 0].tolist() == [1, 1, 1]
    torch.testing.assert_close(splits.test.images[0, :, 31, 31], torch.tensor([-0.6, -0.2, 0.6]))
    assert splits.test.labels.tolist() == [7]


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("data_batch_2.bin", b"\0" * 3072, 3072),
        ("test_batch.bin", b"", 0),
        ("data_batch_1.bin", record(10, 0, 0, 0), 10),
    ],
)
def test_files_in_another_layout_are_refused(
    cifar10: SimpleNamespace, tmp_path: Path, name: str, content: bytes, value: object
) -> None:
    write_cifar10(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PolyaccelError) as caught:
        cifar10.images.read_cifar10(tmp_path)
    assert caught.value.value == value
    assert name in str(caught.value)


def test_a_folder_without_the_files_is_refused(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(PolyaccelError) as caught:
        cifar10.images.read_cifar10(tmp_path)
    assert caught.value.value == str(tmp_path)
    assert all(part in str(caught.value) for part in ("data_batch_*.bin", "test_batch.bin"))


def test_digits_need_no_file(cifar10: SimpleNamespace) -> None:
    training, test = cifar10.images.load_digits()
    assert len(training.labels) + len(test.labels) == 1797
    assert training.images.shape[1:] == (1, 16, 16)
    assert (float(training.images.min()), float(training.images.max())) == (-1.0, 1.0)
    assert np.bincount(test.labels).min() > 20


@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 16)])
def test_the_net_takes_both(cifar10: SimpleNamespace, channels: int, side: int) -> None:
    net = cifar10.model.ConvNet(channels, side)
    assert net(torch.zeros(2, channels, side, side)).shape == (2, 10)
    if channels == 3:  # LeNet as in the tutorials
        assert sum(parameter.numel() for parameter in net.parameters()) == 62006


@pytest.mark.parametrize("fp16", [False, True])
def test_the_config_is_the_tutorials(cifar10: SimpleNamespace, fp16: bool) -> None:
    config = load_resolved(cifar10.train.configured(fp16), world_size=2)
    assert config.fp16.enabled is fp16
    assert (config.train_batch_size, config.zero_optimization.stage, config.gradient_clipping) == (16, 0, 1.0)
    assert config.optimizer is not None
    assert config.optimizer.type == "Adam"
    assert config.optimizer.params["betas"] == (0.8, 0.999)
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_num_steps"] == 1000
