"""Attention over ranks that are processes: gloo and shared memory give the bits that threads give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_marks import over
from sequence_rows import gradients_of, marks_of, own_tokens, random_inputs

from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.context_parallel import AttentionRule, TokenShares, ring_attention, ulysses_attention

LENGTH, ROWS = 23, 2


def attend_here(communicator: Communicator, method: str) -> list[torch.Tensor]:
    """One rank's output and gradients, of packed rows and heads that do not divide."""
    shares = (TokenShares.balanced if method == "ring" else TokenShares.contiguous)(LENGTH, communicator.world_size)
    attention: Any = ring_attention if method == "ring" else ulysses_attention
    marks = marks_of("packed and padded", ROWS, LENGTH)
    *inputs, grad = (own_tokens(one, shares, communicator.rank) for one in random_inputs(ROWS, LENGTH, 6, 2, 8, 8))
    return gradients_of(
        lambda q, k, v: attention(q, k, v, communicator, rule=AttentionRule(), marks=marks, shares=shares), inputs, grad
    )


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("backend", over("gloo", "shm"))
def test_every_backend_gives_the_bits_of_threads(rank_pool: Callable[..., RankPool], backend: str, method: str) -> None:
    expected = run_threads(2, attend_here, method)
    for own, wanted in zip(rank_pool(2, backend).run(attend_here, method), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, wanted, strict=True))
