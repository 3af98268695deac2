"""An engine whose update failed in the middle: nothing is trained on or saved until a checkpoint has been loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity_models import SMALL_BUCKET, assert_bitwise, batch, make_config, on_threads, parity_model, snapshot

import polyaccel
from polyaccel.errors import OffloadError, PolyaccelError
from polyaccel.offload.state_file import StateFile

REFUSAL = r"an update, when 2 of \d+ buckets were updated, failed(.|\n)*hint: load the last checkpoint"


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*batch(step, 0, engine.communicator.rank)))
        engine.step()


@pytest.mark.parametrize("changes", [{}, {"gradient_clipping": 0.5}], ids=["early", "after the norm"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_cannot_be_read_stop_the_training_until_a_checkpoint_is_loaded(
    tmp_path, monkeypatch, stage, changes
):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}
    settings = make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET, **offload}, **changes)
    start = StateFile.start_reading

    def start_elsewhere(file: StateFile, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if file.path.name == "bucket2.exp_avg":
                patch.setattr(file, "path", Path("/dev/null"))
            return start(file, *rest)

    def fail(communicator: Any, model: Any) -> Any:
        engine, *_ = polyaccel.initialize(model=model, config=settings)
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        with monkeypatch.context() as patch:
            patch.setattr(StateFile, "start_reading", start_elsewhere)
            with pytest.raises(OffloadError) as caught:
                train(engine, range(7, 8))
            assert str(caught.value.value).endswith("bucket2.exp_avg")
        engine.zero_grad()
        for use in (
            lambda: train(engine, range(2, 3)),
            lambda: engine.save_checkpoint(str(tmp_path / "broken")),
            lambda: engine.save_16bit_model(str(tmp_path)),
        ):
            with pytest.raises(PolyaccelError) as caught:
                use()
            assert caught.value.value == 2
        engine.load_checkpoint(str(tmp_path / "saved"), load_optimizer_states=False)
        with pytest.raises(PolyaccelError) as caught:  # its optimizer states are of two steps still
            train(engine, range(2, 3))
        assert caught.value.value == 2
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, range(2, 4))
        engine.destroy()
        return snapshot(model)

    def go_on(communicator: Any, model: Any) -> Any:
        engine, *_ = polyaccel.initialize(model=model, config=settings)
        train(engine, range(4))
        engine.destroy()
        return snapshot(model)

    (found,) = on_threads(1, fail, parity_model)
    (wanted,) = on_threads(1, go_on, parity_model)
    assert_bitwise(found, wanted)
    assert not (tmp_path / "broken").exists()
