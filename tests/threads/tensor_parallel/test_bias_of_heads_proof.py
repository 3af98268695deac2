"""The first step of T5 over tensor ranks is proven, though each rank has the position bias of some heads alone."""

from __future__ import annotations

import threading

import torch
from proof_verdicts import pass_on_verdicts, prove_as_users_do
from transformers import T5Config, T5ForConditionalGeneration

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.torch.verify.first_step import FirstStepProof

LENGTH = 64
"""So many tokens that the proof adds elements of the bias up in bins, which hide its shape."""
_LOCK = threading.Lock()


def test_the_first_step_is_proven(monkeypatch, tmp_path):
    prove_as_users_do(monkeypatch, tmp_path)
    verdicts = []
    pass_on_verdicts(monkeypatch, FirstStepProof, verdicts.append)
    draw = torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(1, 64, (2, length), generator=draw) for length in (16, LENGTH))
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}

    def program(_):
        with _LOCK:
            torch.manual_seed(0)
            model = T5ForConditionalGeneration(
                T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes)
            )
        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "mesh": {"tensor": 2}}
        engine, *_ = polyaccel.initialize(model=model, config=config)
        engine.backward(engine(input_ids=inputs, labels=labels).loss)
        engine.step()
        engine.destroy()

    run_threads(2, program)
    assert [one.is_proven for one in verdicts] == [True, True]
