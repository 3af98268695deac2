"""Where ZeRO's states live beside the device: `offload_param`, `offload_optimizer`, `zenflow`, and `aio` for files."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import CountInt, Fraction, Int, PositiveInt, Section

OffloadDevice = Literal["none", "cpu", "nvme"]


class OffloadParamConfig(Section):
    """Where sharded parameters rest while nobody computes with them (stage 3).

    Parameters that are their own master weights (fp32) rest with these where both leave the device: in memory if
    `offload_optimizer` keeps those there, in files if both are in files. What small parameters stay gathered
    (`stage3_param_persistence_threshold`) stays on the device.
    """

    device: OffloadDevice = "none"
    """`none` keeps them on the device, `cpu` in host memory, `nvme` in files, from where they are gathered. The master
    weights are where `offload_optimizer` says."""
    nvme_path: str | None = None
    """Directory for the files of `nvme`, on a disk of this host. Each job makes a folder of its own in it."""
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
    """`none` keeps them on the device, `cpu` in host memory, `nvme` in files. The host updates what lives there."""
    nvme_path: str | None = None
    """Directory for the files of `nvme`, on a disk of this host. Each job makes a folder of its own in it."""
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
    both values are met."""
    ratio: Fraction = 1.0
    """The share of the states that is offloaded, in whole buckets; the first buckets stay on the device."""
    super_offload: bool = False
    """SuperOffload, for hosts with a fast link to the device."""
    cpuadam_cores_perc: Fraction = 0.8
    """The share of the host's cores that update under SuperOffload."""


class ZenFlowConfig(Section):
    """ZenFlow: important gradients are applied at once, the rest on the host and later."""

    topk_ratio: Fraction = 0.1
    """The share of gradient columns that counts as important."""
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """When the important columns are chosen again."""
    select_interval: Int | Literal["auto"] = "auto"
    """How often they are chosen, in units of `select_strategy`."""
    update_interval: Int | Literal["auto"] = "auto"
    """Steps between updates of the rest."""
    overlap_step: bool = False
    """Update on the host while the device goes on."""
    offload: bool = False
    """Keep the important columns' states on the host too."""
    auto_ratio: Fraction = 0.99
    """The threshold by which "auto" decides that the rest is due."""
    full_warm_up_rounds: CountInt = 0
    """Steps at the start in which everything is applied at once."""
    pt_reserved_cores_perc: Fraction = 0.5
    """The share of the host's cores that is left to the framework."""


class AioConfig(Section):
    """Asynchronous file access for the `nvme` tier."""

    block_size: PositiveInt = 1_048_576
    """Bytes of one request."""
    queue_depth: PositiveInt = 8
    """Requests in flight for each thread."""
    intra_op_parallelism: PositiveInt = 1
    """Threads that share one operation."""
    single_submit: bool = False
    """Submit requests one by one instead of in a batch."""
    overlap_events: bool = True
    """Submit new requests while others complete."""
    use_gds: bool = False
    """Transfer between files and the device directly (GPUDirect Storage)."""
