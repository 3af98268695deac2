"""What can be set without changing what is trained: `Candidate`, and all of them that a config allows.

Samples of an optimizer step stay as they are, so a candidate's micro-batch says how many it accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import data_ranks
from polyaccel.config.sections.offload import OffloadDevice
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.planner.forecast import Setting

_USUAL_BUCKET_NUMEL: int = ZeroConfig().reduce_bucket_size
_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A stage with its offload, samples of a micro-batch and micro-batches of a step on each rank, whether the model's
    blocks are computed again, the most elements of a bucket, and the ranks along `tensor` and `sequence`."""

    stage: int
    micro_batch: int
    accumulation: int
    offload: OffloadDevice = "none"
    offload_param: OffloadDevice = "none"
    recomputes: bool = False
    bucket_numel: int
    tensor: int = 1
    sequence: int = 1

    @property
    def setting(self) -> Setting:
        """The stage and its offload, as the planner calls them."""
        return Setting(self.stage, self.offload, self.offload_param)

    @property
    def sharing(self) -> int:
        """Ranks that share a batch."""
        return self.tensor * self.sequence

    def applied_to(self, config: ResolvedConfig) -> ResolvedConfig:
        """`config` with these settings and everything else as it was."""
        changed = self.setting.applied_to(config)
        zero = changed.zero_optimization.model_copy(update={"reduce_bucket_size": self.bucket_numel})
        recompute = config.activation_checkpointing.model_copy(update={"enabled": self.recomputes})
        mesh = config.mesh.model_copy(update={"tensor": self.tensor, "sequence": self.sequence})
        return changed.model_copy(
            update={
                "zero_optimization": zero,
                "activation_checkpointing": recompute,
                "mesh": mesh,
                "train_micro_batch_size_per_gpu": self.micro_batch,
                "gradient_accumulation_steps": self.accumulation,
            }
        )

    def changes(self, train_batch_size: int) -> dict[str, Any]:
        """What a config has to say for these settings, as a tree of JSON."""
        tree: dict[str, Any] = {
            "train_batch_size": train_batch_size,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.bucket_numel,
                "offload_optimizer": {"device": self.offload},
                "offload_param": {"device": self.offload_param},
            },
            "activation_checkpointing": {"enabled": self.recomputes},
        }
        tree["mesh"] = {"tensor": self.tensor, "sequence": self.sequence}
        return tree

    def as_record(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        words = [f"stage {self.stage}", f"micro-batch {self.micro_batch} x {self.accumulation}"]
        if self.offload != "none":
            words.append(f"offload {self.offload}" + (f"/{self.offload_param}" if self.offload_param != "none" else ""))
        words += ["recomputed"] if self.recomputes else []
        words += [f"buckets of {self.bucket_numel:,}"] if self.bucket_numel < _USUAL_BUCKET_NUMEL else []
        words += [f"{axis} {size}" for axis, size in (("tensor", self.tensor), ("sequence", self.sequence)) if size > 1]
        return ", ".join(words)


def own_candidate(config: ResolvedConfig) -> Candidate:
    """The settings of `config` itself."""
    setting = Setting.from_config(config)
    return Candidate(
        stage=setting.stage,
        offload=setting.offload,
        offload_param=setting.offload_param,
        micro_batch=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps,
        recomputes=config.activation_checkpointing.recomputes_blocks,
        bucket_numel=config.zero_optimization.reduce_bucket_size,
        tensor=config.mesh.tensor,
        sequence=config.mesh.sequence,
    )


def candidates(config: ResolvedConfig, world_size: int, *, is_remote: bool) -> tuple[Candidate, ...]:
    """Return candidates of `autotuning`, the config's first; `is_remote`: states may leave the device."""
    section, own = config.autotuning, own_candidate(config)
    zero = config.zero_optimization
    places = section.offload or (("none", "cpu") if is_remote else ("none",))
    buckets = dict.fromkeys((zero.reduce_bucket_size, *section.bucket_sizes))
    found = dict.fromkeys([own])
    for tensor, sequence in product(_with(own.tensor, section.tensor), _with(own.sequence, section.sequence)):
        ranks = data_ranks(config, world_size) * own.sharing
        if ranks % (tensor * sequence):
            continue
        batches = list(_batches(config, ranks // (tensor * sequence)))
        for stage, recomputes, (micro, count) in product(section.stages, section.checkpointing, batches):
            for offload, params in _offloads(stage, places, config):
                for bucket in buckets:
                    one = replace(own, stage=stage, recomputes=recomputes, micro_batch=micro, accumulation=count)
                    one = replace(one, offload=offload, offload_param=params, tensor=tensor, sequence=sequence)
                    found[replace(one, bucket_numel=bucket)] = None
    return tuple(found)


def _with(own: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((own, *others)))


def _batches(config: ResolvedConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """Micro-batches, the largest first, and how many of each make the samples of a step on `ranks` ranks."""
    if config.train_batch_size % ranks:
        return
    samples, section = config.train_batch_size // ranks, config.autotuning
    least, most = section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu
    for micro in range(min(most, samples), least - 1, -1):
        if samples % micro == 0:
            yield micro, samples // micro


def _offloads(
    stage: int, places: tuple[OffloadDevice, ...], config: ResolvedConfig
) -> Iterator[tuple[OffloadDevice, OffloadDevice]]:
    """Where states and parameters may be. Parameters follow states at stage 3."""
    zero = config.zero_optimization
    for place in places:
        if place == "nvme" and zero.offload_optimizer.nvme_path is None:
            continue
        yield place, "none"
        if stage == 3 and place == "cpu":
            yield place, "cpu"
        elif stage == 3 and place == "nvme" and zero.offload_param.nvme_path is not None:
            yield place, "nvme"


def quiet_changes(folder: Path) -> Mapping[str, Any]:
    """What a trial's config has in addition to its candidate: its figures go into `folder` alone."""
    return {
        "run_dir": str(folder),
        "monitors": None,
        **{name: {"enabled": False} for name in _MONITORS},
        "elasticity": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "trace": None,
        "alerts": {"enabled": False},
        "wall_clock_breakdown": False,
    }
