"""The dynamic code of 8 bits, as numbers.

It is "dynamic tree quantisation" (Dettmers et al. 2022, arXiv 2110.02861, section 2). The 256 values are those of
`create_dynamic_map` in bitsandbytes and torchao: each of seven powers of ten has twice as many values as the one below.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

_POWERS = 7


@cache
def dynamic_code(*, signed: bool) -> npt.NDArray[np.float32]:
    """Return the 256 values of the code in ascending order, from -0.993 or 0 to 1. Not to be written to."""
    values = [0.0, 1.0]
    for power in range(_POWERS):
        bounds = np.linspace(0.1, 1, 2 ** (power + (0 if signed else 1)) + 1, dtype=np.float32)
        means = (10.0 ** (power - _POWERS + 1)) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        values += means.tolist()
        if signed:
            values += (-means).tolist()
    found = np.sort(np.array(values, np.float32))
    found.flags.writeable = False
    return found


@cache
def code_borders(*, signed: bool) -> npt.NDArray[np.float32]:
    """Return the 255 means of neighbours in the code. A number on a border belongs to the value below."""
    code = dynamic_code(signed=signed).astype(np.float64)
    found = ((code[:-1] + code[1:]) / 2).astype(np.float32)
    found.flags.writeable = False
    return found
