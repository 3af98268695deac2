"""What tests of kernels share: the instruction sets of this processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyaccel.ops.native import native


@pytest.fixture(params=("avx512", "avx2", "portable", "neon"))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of each instruction set that this processor has, while kernels use it."""
    before = native().isa
    if not choose(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert choose(before)


def choose(isa: str) -> bool:
    """Let kernels use an instruction set; returns whether they can."""
    library = native().library
    return library is not None and library.pa_choose_isa(isa.encode()) == 0
