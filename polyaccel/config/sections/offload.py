"""Where ZeRO's states live outside the device: `offload_param` and `offload_optimizer`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyaccel.config.section import CountInt, Fraction, Params, PositiveInt, Section

OffloadDevice = Annotated[str, Field(examples=["none", "cpu", "nvme"])]
"""`none`, `cpu`, `nvme`, or the name of another installed plugin of the group `polyaccel.tiers`."""
BUILT_IN_DEVICES = ("none", "cpu", "nvme")


class OffloadParamConfig(Section):
    """Where sharded parameters rest while they are not computed with (stage 3).

    Parameters that are their own master weights (fp32) rest with these where both leave the device: in memory if
    `offload_optimizer` keeps those there, in files if both are in files. What small parameters stay gathered
    (`stage3_param_persistence_threshold`) stays on the device.
    """

    device: OffloadDevice = "none"
    """`none` keeps them on the device, `cpu` in host memory, `nvme` in files, from where they are gathered; any other
    name is that of an installed plugin of the group `polyaccel.tiers`. The master weights are where
    `offload_optimizer` sets."""
    tier_options: Params = Field(default_factory=dict, validate_default=True)
    """polyaccel's own: options of the plugin that `device` names, which checks them. `none`, `cpu` and `nvme` have
    none."""
    nvme_path: str | None = None
    """Directory for the files of `nvme`, on a disk of this host. Each job makes its own folder in it."""
    buffer_count: PositiveInt = 5
    """Under `nvme`, host buffers between files and a device whose memory is not the host's: so many are read ahead."""
    buffer_size: PositiveInt = 100_000_000
    """Elements of each of those buffers at most. A larger shard passes through them in pieces."""
    max_in_cpu: CountInt = 1_000_000_000
    """Elements that each rank keeps in host memory under `nvme`, in whole buckets, the first ones first."""
    pin_memory: bool = True
    """Use page-locked host memory, where the device has any use for it."""


class OffloadOptimizerConfig(Section):
    """Where optimizer states and master weights live."""

    device: OffloadDevice = "none"
    """`none` keeps them on the device, `cpu` in host memory, `nvme` in files; the host updates what lives there. Any
    other name is that of an installed plugin of the group `polyaccel.tiers`."""
    tier_options: Params = Field(default_factory=dict, validate_default=True)
    """polyaccel's own: options of the plugin that `device` names, which checks them. `none`, `cpu` and `nvme` have
    none."""
    nvme_path: str | None = None
    """Directory for the files of `nvme`, on a disk of this host. Each job makes its own folder in it."""
    buffer_count: PositiveInt = 4
    """Under `nvme`, host buffers between kernels and files, each as long as the longest state of a bucket. A bucket
    under Adam needs three, and so many more for `pipeline_read` and `pipeline_write` each; that many are used at
    least. More let reads run further ahead."""
    pin_memory: bool = True
    """Use page-locked host memory, where the device has any use for it."""
    pipeline_read: bool = False
    """Under `nvme`, read the next states while the present ones are updated."""
    pipeline_write: bool = False
    """Under `nvme`, write the last states while the present ones are updated."""
    fast_init: bool = False
    """Initialise states under `nvme` with fewer passes over the files. New files are zeros without any pass here, so
    both values have the same effect."""
    ratio: Fraction = 1.0
    """The share of the states that is offloaded, in whole buckets; the first buckets stay on the device."""
