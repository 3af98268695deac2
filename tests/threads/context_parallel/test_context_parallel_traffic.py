"""What attention over ranks sends, counted by the recorder, is what the formulas of the papers say."""

from __future__ import annotations

import pytest
import torch
from sequence_rows import gradients_of, own_tokens, random_inputs

from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.torch.context_parallel import AttentionRule, DocumentMask, TokenShares, ring_attention, ulysses_attention

ROWS, WIDTH = 2, 8


def sent_numel(attention, world, length, heads, key_heads, dtype=torch.float32):
    """What each rank sent by operation, forward alone, and forward and backward."""
    *inputs, grad = random_inputs(ROWS, length, heads, key_heads, WIDTH, WIDTH, dtype)
    shares = TokenShares.contiguous(length, world)

    def run(inner):
        communicator = RecordingCommunicator(inner, watch_s=None)
        rank, recorder = communicator.rank, communicator.recorder
        forward = {}

        def compute(q, k, v):
            out = attention(q, k, v, communicator, rule=AttentionRule(), marks=DocumentMask(length), shares=shares)
            forward.update(recorder.sent_numel)
            return out

        gradients_of(compute, [own_tokens(one, shares, rank) for one in inputs], own_tokens(grad, shares, rank))
        return forward, dict(recorder.sent_numel)

    return run_threads(world, run)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("key_heads", [8, 4])
def test_ulysses_sends_its_share_of_queries_keys_values_and_outputs(world, key_heads):
    """Of M numbers a rank has M/N, of which (N-1)/N go to others: M (N-1) / N^2, for each of the four tensors."""
    length, heads = 16, 8
    queries, keys = ROWS * length * heads * WIDTH, ROWS * length * key_heads * WIDTH
    expected = (2 * queries + 2 * keys) * (world - 1) / world**2
    for forward, both in sent_numel(ulysses_attention, world, length, heads, key_heads):
        assert forward == {"all_to_all": expected}
        assert both == {"all_to_all": 2 * expected}


def test_ulysses_sends_a_key_head_to_each_rank_that_needs_it():
    """One key head for eight query heads: each of four ranks gets it whole, and sends it as its neighbours do."""
    world, length, heads = 4, 16, 8
    tokens = ROWS * length * WIDTH
    expected = 2 * tokens * heads * (world - 1) / world**2 + 2 * tokens / world * (world - 1)
    for forward, both in sent_numel(ulysses_attention, world, length, heads, 1):
        assert forward == {"all_to_all": expected}
        assert both == {"all_to_all": 2 * expected}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_the_ring_sends_keys_and_values_to_all_others_and_their_gradients_back(world, key_heads):
    """A rank's keys and values, 2 M/N numbers, N-1 times; backward once more, and their gradients as often."""
    length = 24
    own = 2 * ROWS * length * key_heads * WIDTH / world
    for forward, both in sent_numel(ring_attention, world, length, 8, key_heads):
        assert forward == {"batch": (world - 1) * own}
        assert both == {"batch": 3 * (world - 1) * own}
