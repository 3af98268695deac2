"""Files of flax, and trees of orbax as flax saves them, come in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyaccel.checkpoint import open_checkpoint
from polyaccel.cli.main import main

flax = pytest.importorskip("flax.serialization", reason="make test-exchange has an environment with it")
ocp = pytest.importorskip("orbax.checkpoint", reason="make test-exchange has an environment with it")

PARAMS = {"dense": {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}}
STATE = {"step": np.array(3), "params": PARAMS, "opt_state": [{"mu": PARAMS}, None]}
NAMES = {("dense.kernel", (2, 3)), ("dense.bias", (3,))}


def taken(folder: Path) -> set[tuple[str, tuple[int, ...]]]:
    return {(entry.fqn, tuple(entry.shape)) for entry in open_checkpoint(folder).tensors()}


def test_parameters_of_flax_come_in(tmp_path: Path) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(flax.msgpack_serialize(PARAMS))
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "flax"]) == 0
    assert taken(tmp_path / "c") == NAMES


def test_a_train_state_of_flax_needs_the_word_that_weights_are_enough(tmp_path: Path) -> None:
    state = {"step": 3, "params": PARAMS, "opt_state": {"0": {"mu": PARAMS}}}
    (tmp_path / "state.msgpack").write_bytes(flax.msgpack_serialize(state))
    arguments = ["ckpt", "import", str(tmp_path / "state.msgpack"), str(tmp_path / "c"), "--from", "flax"]
    assert main(arguments) == 1
    assert main([*arguments, "--weights-only"]) == 0
    assert taken(tmp_path / "c") == NAMES


@pytest.mark.parametrize("place", [".", "3", "3/default"])
def test_a_tree_with_lists_comes_in_from_any_folder_of_a_manager(place: str, tmp_path: Path) -> None:
    ocp.PyTreeCheckpointer().save(tmp_path / "run" / "3" / "default", STATE)
    arguments = ["ckpt", "import", str(tmp_path / "run" / place), str(tmp_path / "c"), "--from", "orbax"]
    assert main(arguments) == 1
    assert main([*arguments, "--weights-only"]) == 0
    assert taken(tmp_path / "c") == NAMES
