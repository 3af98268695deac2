"""The Triton kernels compiled for GPUs that need not be here, down to machine code. `make test-triton`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("in this process Triton interprets", allow_module_level=True)

from polyaccel.ops.triton import keeps_subnormals

if not keeps_subnormals(triton.__version__):
    pytest.skip(f"cuda does not use these kernels with Triton {triton.__version__}", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polyaccel.ops.triton.blocks import add_up, dequantize_blocks, partial_square_sums, quantize_blocks
from polyaccel.ops.triton.numbers import BFLOAT16, FLOAT16, NOTHING, PLAIN
from polyaccel.ops.triton.updates import SWEEPS, recorded_sweep, sweep

A100, H100 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
ROUNDED_ONCE = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}


def compile_to(target: GPUTarget, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """The PTX of `kernel`; what is in neither mapping is a float32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    where = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=where)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert compiled.asm["cubin"]
    ptx: str = compiled.asm["ptx"]
    return ptx


def arithmetic(ptx: str) -> set[str]:
    """The operations on float32 that round."""
    found = re.findall(r"\b((?:add|sub|mul|div|sqrt|fma|mad|ex2|rcp|rsqrt)(?:\.[a-z]+)*\.f32)\b", ptx)
    return set(found)


@pytest.mark.parametrize("target", [A100, H100], ids=lambda target: f"sm_{target.arch}")
@pytest.mark.parametrize("formula", [*sorted(SWEEPS), "cast"])
def test_updates_round_each_operation_once(formula: str, target: GPUTarget) -> None:
    types = dict.fromkeys(("weights", "first", "second", "direction"), "*fp32")
    types |= dict.fromkeys(("grad", "out"), "*i16") | dict.fromkeys(("numel", "low", "high", "start"), "i32")
    kinds: dict[str, Any] = dict.fromkeys(("WEIGHTS", "FIRST", "SECOND", "DIRECTION"), PLAIN.value)
    kinds |= {"FORMULA": formula, "OUT": BFLOAT16.value, "STOCHASTIC": True, "BLOCK": 1024}
    kinds["GRAD"] = NOTHING.value if formula == "cast" else FLOAT16.value
    ptx = compile_to(target, sweep, types, kinds)
    assert arithmetic(ptx) <= ROUNDED_ONCE
    if formula in ("adamw", "adam", "lamb"):
        assert {"div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32"} <= arithmetic(ptx)


@pytest.mark.parametrize("formula", sorted(SWEEPS))
def test_updates_that_read_their_numbers_compile(formula: str) -> None:
    types = dict.fromkeys(("weights", "first", "second", "direction"), "*fp32") | {"numbers": "*fp64", "numel": "i32"}
    types |= dict.fromkeys(("grad", "out"), "*i16")
    kinds: dict[str, Any] = dict.fromkeys(("WEIGHTS", "FIRST", "SECOND", "DIRECTION"), PLAIN.value)
    kinds |= {"FORMULA": formula, "OUT": BFLOAT16.value, "GRAD": FLOAT16.value, "COUNT": 9, "BLOCK": 1024}
    ptx = compile_to(H100, recorded_sweep, types, kinds)
    assert arithmetic(ptx) <= ROUNDED_ONCE
    assert "cvt.rn.f32.f64" in ptx


def test_sums_are_in_float64() -> None:
    pointers = {"base": "*i16", "partials": "*fp64", "starts": "*i64", "counts": "*i64"}
    ptx = compile_to(H100, partial_square_sums, pointers, {"KIND": BFLOAT16.value, "BLOCK": 4096})
    assert "f64" in ptx
    assert not arithmetic(ptx)
    plan = dict.fromkeys(("indices", "firsts", "counts"), "*i64")
    assert compile_to(H100, add_up, {"partials": "*fp64", "out": "*fp64", **plan}, {})


@pytest.mark.parametrize("packed", [True, False])
def test_quantisation_compiles(packed: bool) -> None:
    pointers = {"codes": "*u8" if packed else "*i8", "scales": "*fp32", "numel": "i32", "block_numel": "i32"}
    constants = {"KIND": BFLOAT16.value, "PACKED": packed, "BLOCK": 256}
    assert arithmetic(compile_to(H100, quantize_blocks, {**pointers, "source": "*i16"}, constants)) <= ROUNDED_ONCE
    assert arithmetic(compile_to(H100, dequantize_blocks, {**pointers, "out": "*i16"}, constants)) <= ROUNDED_ONCE
