"""What torch must know of a device: the host meets all of it, and what is missing is named with its use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from unittest import SkipTest

import pytest
import torch

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.testkit.accelerator.torch_needs import NEEDS, TorchNeed

HOST = CpuAccelerator("torch")


class Unknown(CpuAccelerator):
    name = "unknown"
    torch_device_type = None


class Misnamed(CpuAccelerator):
    name = "misnamed"
    torch_device_type = "meta"
    """Of torch's own devices the one that computes nothing."""


@pytest.mark.parametrize("need", NEEDS, ids=[f"need {number}" for number in range(len(NEEDS))])
def test_the_host_meets_it(need: TorchNeed) -> None:
    with suppress(SkipTest):  # it has no streams and nothing to pin memory for
        need.check(HOST)


@pytest.mark.parametrize("need", NEEDS, ids=[f"need {number}" for number in range(len(NEEDS))])
def test_it_is_not_asked_of_a_device_that_torch_does_not_know(need: TorchNeed) -> None:
    with pytest.raises(SkipTest):
        need.check(Unknown())


def test_a_device_without_memory_fails_with_what_it_is_for() -> None:
    copies = next(need for need in NEEDS if need.used_for == "everything")
    with pytest.raises(AssertionError) as caught:
        copies.check(Misnamed())
    assert "'meta'" in str(caught.value)


def test_the_reason_stands_in_the_error() -> None:
    def fail(accelerator: Accelerator) -> None:
        torch.ones(2).view(3)

    with pytest.raises(AssertionError) as caught:
        replace(NEEDS[0], used_for="a test", tried=fail).check(HOST)
    assert all(part in str(caught.value) for part in ("RuntimeError", "'[3]'"))
