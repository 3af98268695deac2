"""The ops as Triton kernels."""

from __future__ import annotations

import re


def keeps_subnormals(version: str) -> bool:
    """Whether a Triton of this version divides and takes roots of subnormal numbers as declared. Before 3.6, which came
    with torch 2.10, they are zeros to it, whatever a kernel asks for."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers >= [3, 6]
