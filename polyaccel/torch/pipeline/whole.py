"""The whole model, of which each stage has a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype, wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType


def merged_tensors(own: Mapping[str, Any], ranks: Communicator, device: torch.device) -> dict[str, Any]:
    """The tensors of the state dicts of all stages, and what else this one's has. `ranks` are the stages in order.
    Collective."""
    mine = [(name, dtype_of(one.dtype).value, list(one.shape)) for name, one in own.items() if isinstance(one, Tensor)]
    whole: dict[str, Any] = {}
    for stage, entries in enumerate(ranks.all_gather_object(mine)):
        for name, dtype, shape in entries:
            if stage == ranks.rank:
                flat = own[name].detach().contiguous().view(-1)
            else:
                numel = torch.Size(shape).numel()
                flat = torch.empty(numel, dtype=torch_dtype(DType(dtype)), device=device)
            if flat.numel():
                ranks.broadcast(wrap_torch(flat), stage, label="whole model")
            whole[name] = own[name] if stage == ranks.rank else flat.view(shape)
    return {**whole, **own}


def own_entries(
    state_dict: Mapping[str, Any], own: Collection[str], ranks: Communicator, *, strict: bool
) -> dict[str, Any]:
    """What this stage takes of the state dict of a whole model: the entries with names of `own`. Collective. Raises
    torch's RuntimeError on every stage, with `strict`, for a name that no stage has."""
    known = {name for names in ranks.all_gather_object(sorted(own)) for name in names}
    unknown = sorted(state_dict.keys() - known)
    if strict and unknown:
        raise RuntimeError(f"no state_dict of this pipeline: Unexpected key(s): {', '.join(unknown[:8])}")
    return {name: value for name, value in state_dict.items() if name in own}
