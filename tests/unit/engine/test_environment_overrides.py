"""Environment variables that go before a key of the config, and what is logged of them."""

from __future__ import annotations

import pytest

from polyaccel.accelerators import detect
from polyaccel.comm import destroy_process_group, init_distributed
from polyaccel.config import load_resolved
from polyaccel.engine.policies.engines import VARIABLES, replaced_values


def test_a_replaced_value_is_stated_with_the_variable() -> None:
    tree = {"train_batch_size": 1, "comm": {"backend": "gloo"}, "matrix_kernels": "off", "log_level": "debug"}
    config = load_resolved(tree, world_size=1)
    environment = {"POLYACCEL_COMM": "shm", "POLYACCEL_MATRIX_KERNELS": "off", "DS_ACCELERATOR": "cpu"}
    (sentence,) = replaced_values(config, environment)
    assert all(part in sentence for part in ("comm.backend", "'gloo'", "POLYACCEL_COMM=shm"))
    assert list(replaced_values(config, {})) == []
    assert set(detect.VARIABLES) < set(VARIABLES)


def test_a_variable_goes_before_the_accelerator_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(detect, "_chosen", None)
    init_distributed(rank=0, world_size=1, dist_backend="local", config={"accelerator": "nowhere"})
    try:
        assert detect.get_accelerator().name == "cpu"
    finally:
        destroy_process_group()
