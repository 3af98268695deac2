"""Generation from an engine of the drop-in, with the section that scripts of DeepSpeed-Chat have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from transformer_models import transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

SECTION = {
    "enabled": True,
    "max_out_tokens": 12,
    "inference_tp_size": 1,
    "release_inference_cache": True,
    "pin_parameters": True,
    "tp_gather_partition_size": 8,
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_generates_what_its_module_does(stage: int, trains: bool) -> None:
    models = [transformer_model("gpt2") for _ in range(3)]
    prompt, asked = transformer_batch("gpt2", length=5)["input_ids"], {"max_new_tokens": 7, "do_sample": False}
    wanted = models.pop().eval().generate(prompt, **asked)  # type: ignore[operator]

    def body(communicator: Communicator) -> None:
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
        config |= {"zero_optimization": {"stage": stage}, "hybrid_engine": SECTION}
        if trains:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        engine = deepspeed.initialize(model=models[communicator.rank], config=config)[0]
        assert type(engine) is DeepSpeedHybridEngine
        assert torch.equal(engine.generate(prompt, **asked), wanted)
        rollout = build_rollout(RolloutConfig(), engine, SimpleNamespace(pad_token_id=0, eos_token_id=None))
        request = RolloutRequest(prompt, torch.ones_like(prompt))
        rolled = rollout.generate(request, SamplingConfig(max_new_tokens=7, temperature=0.0))
        assert torch.equal(rolled.input_ids, wanted)
        with pytest.raises(PolyaccelError) as caught:
            engine.generate(prompt, max_new_tokens=8)
        assert caught.value.value == 13

    run_threads(2, body)
