"""Proofs at the first step of right programs under each mesh, with the default of `verify`; and of planted errors.

`TESTS_FIRST_STEPS=full` takes all cases of `first_steps`, otherwise a sample.
"""

from __future__ import annotations

import os

import pytest
import torch
from first_steps import Case, cases, planted, run, watching
from zoo_models import NotBuilt

from polyaccel.comm.init.threads import run_threads

IS_FULL = os.environ.get("TESTS_FIRST_STEPS") == "full"
SAMPLE = [
    Case("causal/llama", "Ulysses 2, stage 3", "bf16"),
    Case("causal/mixtral", "expert 2", "fp32"),
    Case("causal/llama", "tiles", "fp16"),
    Case("plain, batch norm", "pipeline 2", "bf16"),
]


@pytest.fixture(autouse=True)
def proofs(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYACCEL_VERIFY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)
    with watching():
        yield


def verdicts(case):
    try:
        return run_threads(2, lambda _: run(case))
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", list(cases()) if IS_FULL else SAMPLE, ids=str)
def test_a_right_program_is_no_alarm(case):
    found = verdicts(case)
    assert found[0].result in (("proven", "not proven", "refused") if IS_FULL else ("proven",)), found


@pytest.mark.parametrize("case", list(cases())[::6] if IS_FULL else SAMPLE[2:3], ids=str)
def test_a_wrong_program_is_an_alarm(case):
    with planted(case):
        found = verdicts(case)
    assert found[0].result in (("alarm", "not proven", "refused") if IS_FULL else ("alarm",)), found
