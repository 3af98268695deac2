"""Parameters of tests that run at several ZeRO stages."""

from __future__ import annotations

import pytest

stages = pytest.mark.parametrize("stage", [0, 1, 2])
both_backwards = pytest.mark.parametrize("own_backward", [True, False], ids=["engine.backward", "loss.backward"])
