"""A token of each sequence as one call of csrc/decode: see `DecodeStepsFn`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Any

import torch

from polyaccel.ops.decode import AttentionStep, DecodeStep, LinearStep, PackedWeight, RowwiseStep
from polyaccel.ops.native import Native
from polyaccel.ops.torch import decode_calls as calls
from polyaccel.ops.torch.decode_calls import ROWWISE, TYPES, CRowwise, CStep, address

_LINEAR, _GROUPED, _ATTENTION, _ROWWISE = range(4)


class Steps:
    """Operations whose memory stays; a call runs them for the first rows."""

    def __init__(self, library: Native, steps: Sequence[DecodeStep]) -> None:
        self._library = library
        self._kept = list(steps)
        packed = [one for one in steps if isinstance(one, LinearStep) and isinstance(one.weight, PackedWeight)]
        # One after the other uses it.
        self._integers = torch.empty(max((calls.scratch_numel(one.weight, len(one.x)) for one in packed), default=0))
        self._calls = [self._call(one) for one in steps]
        self._steps = (CStep * len(steps))(*(CStep(addressof(call), kind) for call, kind in self._calls))
        attentions = [one for one in steps if isinstance(one, AttentionStep)]
        self._scratch_numel = max((calls.attention_scratch_numel(one.pages) for one in attentions), default=0)
        self._scratch = torch.empty(0)

    def __call__(self, rows: int) -> None:
        threads = torch.get_num_threads()
        if len(self._scratch) < threads * self._scratch_numel:
            self._scratch = torch.empty(threads * self._scratch_numel)
        self._library.call("pa_steps", len(self._steps), byref(self._steps), rows, self._scratch.data_ptr(), threads)

    def _call(self, step: DecodeStep) -> tuple[ctypes.Structure, int]:
        if isinstance(step, RowwiseStep):
            return _rowwise(step), _ROWWISE
        if isinstance(step, AttentionStep):
            attention = calls.attention_call(step.pages, step.turns, step.heads, step.scale)
            attention.set_tokens(step.q, step.k, step.v, step.out, step.slots, step.positions)
            return attention, _ATTENTION
        call: Any
        if isinstance(step.weight, PackedWeight):
            call, kind = calls.grouped_call(step.weight), _GROUPED
            call.type, call.bias = TYPES[step.x.dtype], address(step.bias)
            calls.set_scratch(call, step.weight, len(step.x), self._integers)
        else:
            call, kind = calls.linear_call(step.weight, step.bias), _LINEAR
        call.x, call.x_row, call.y, call.y_row = (
            step.x.data_ptr(),
            step.x.stride(0),
            step.y.data_ptr(),
            step.y.stride(0),
        )
        return call, kind


def _rowwise(step: RowwiseStep) -> CRowwise:
    other_row = 0 if step.other is None else step.other.stride(0)
    memory = (address(one) for one in (step.x, step.other, step.weight, step.bias, step.y))
    sizes = (step.y.shape[1] // step.per_row, step.per_row, step.x.stride(0), other_row, step.y.stride(0))
    return CRowwise(*memory, *sizes, step.eps, ROWWISE.index(step.kind), TYPES[step.x.dtype])
