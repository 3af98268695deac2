"""Whose `deepspeed` this is: another package of the name is an error with a hint, not a mixture."""

from __future__ import annotations

import os
import sys
from functools import cache
from logging import getLogger

from polyaccel_deepspeed.version import __version__

log = getLogger("polyaccel.deepspeed")
_OURS = {"__init__.py", "__pycache__"}
_TRAINERS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
"""Packages whose loops call the engine that they are given. transformers and TRL build theirs by accelerate."""
_HINT = "pip uninstall --yes deepspeed, until nothing of it is left; then install the one that you want"


def refuse_mixture(folder: str) -> None:
    """Raise PolyaccelError if files of another package lie in `folder`, the one of our `deepspeed/__init__.py`: Python
    would import some names from there and some from here."""
    others = sorted(name for name in os.listdir(folder) if name not in _OURS)
    if others:
        from polyaccel.errors import PolyaccelError

        raise PolyaccelError(
            f"two packages named deepspeed are installed into {folder}: {others[0]} is not of polyaccel's",
            hint=_HINT,
            value=folder,
        )


@cache
def refuse_another() -> None:
    """Raise PolyaccelError if Python finds the metadata of another distribution `deepspeed` before ours: trainers would
    decide by its version. Without any metadata, as in a checkout, there is nothing to decide by."""
    from importlib.metadata import PackageNotFoundError, distribution

    from polyaccel.errors import PolyaccelError

    try:
        found = distribution("deepspeed")
    except PackageNotFoundError:
        return
    if found.version != __version__:
        raise PolyaccelError(
            f"two packages named deepspeed are installed: polyaccel's {__version__} is what was imported, and "
            f"{found.version} in {found.locate_file('')} is what its version is asked of",
            hint=_HINT,
            value=found.version,
        )


def refuse_uncounted(world_size: int) -> None:
    """Raise PolyaccelError if accelerate drives DeepSpeed and counts other ranks than the job has: its data loaders
    would give every rank the same samples."""
    module = sys.modules.get("accelerate.state")
    state = {} if module is None else module.PartialState._shared_state
    counted = state.get("num_processes", world_size)
    if getattr(state.get("distributed_type"), "value", "") == "DEEPSPEED" and counted != world_size:
        from polyaccel.errors import PolyaccelError

        raise PolyaccelError(
            f"accelerate counts {counted} ranks of a job that has {world_size}",
            hint='on CPUs: TrainingArguments(use_cpu=True, ddp_backend="gloo"), or Accelerator(kwargs_handlers='
            '[InitProcessGroupKwargs(backend="gloo")]); with cpu=True accelerate trains without DeepSpeed',
            value=counted,
        )


def refuse_stages(caller: str, stages: int) -> None:
    """Raise PolyaccelError if a trainer, of whose module `caller` is the name, would train a model over `stages`: its
    loop runs forward passes, and each rank has the layers of one stage alone."""
    trainer = caller.partition(".")[0]
    if stages > 1 and trainer in _TRAINERS:
        from polyaccel.errors import PolyaccelError

        raise PolyaccelError(
            f"{trainer} cannot train over {stages} pipeline stages: its loop runs forward passes of whole models",
            hint='leave "pipeline": {"stages": ...} out, and share the model by "tensor_parallel": {"autotp_size": '
            f"{stages}}} or stage 3; or write the loop, with engine.train_batch(data_iter)",
            value=stages,
        )


@cache
def tell_whose() -> None:
    """Log once whose package this is."""
    log.info("deepspeed %s: DeepSpeed's names over polyaccel, by the polyaccel project", __version__)
