"""Statements in any order between the steps of any training end where plain torch ends.

`make test` draws a few sequences, `make test-ownership` 2,000.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_statements import HONOURED, assert_honoured, config_for, data_of_other_strides, train_with
from parity_models import on_threads, parity_model

VARIABLE = "TESTS_OWNERSHIP"
EXAMPLES = int(os.environ.get(VARIABLE, "20"))
# Plain torch keeps the strides that it was given, and then refuses to make a vector of the parameters.
STATEMENTS = [statement for statement in HONOURED if statement is not data_of_other_strides]
SCRIPTS = st.lists(st.lists(st.sampled_from(STATEMENTS), max_size=2), min_size=2, max_size=4)


@pytest.mark.timeout(300 + 3 * EXAMPLES)
@settings(max_examples=EXAMPLES, derandomize=VARIABLE not in os.environ, deadline=None)
@given(
    script=SCRIPTS,
    stage=st.integers(0, 3),
    kind=st.sampled_from(["fp32", "bf16", "offload"]),
    world=st.integers(1, 3),
    accumulation=st.integers(1, 2),
)
def test_any_sequence_of_statements_counts(script, stage, kind, world, accumulation):
    config = config_for(stage, kind, accumulation)
    runs = on_threads(world, train_with, parity_model, config, script)
    assert_honoured(runs, kind, accumulation, script)
