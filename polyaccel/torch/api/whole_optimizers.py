"""The optimizers of this package that look at whole parameters, by the names that a config uses.

A row is a class, whose arguments are the section of `polyaccel.config`. Each parameter is whole on the rank that owns
it, and its states are with that rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polyaccel.torch.api.came import Came
from polyaccel.torch.api.preconditioned import Shampoo, Soap

WHOLE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {"CAME": Came, "Shampoo": Shampoo, "SOAP": Soap}
