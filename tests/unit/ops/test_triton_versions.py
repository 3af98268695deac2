"""Which versions of Triton the kernels are for."""

from __future__ import annotations

import pytest

from polyaccel.ops.triton import keeps_subnormals


@pytest.mark.parametrize(("version", "keeps"), [("3.4.0", False), ("3.5.1", False), ("3.6.0", True), ("4.0", True)])
def test_kernels_are_for_versions_that_keep_subnormals(version: str, keeps: bool) -> None:
    assert keeps_subnormals(version) is keeps
