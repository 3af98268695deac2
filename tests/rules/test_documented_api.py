"""Every parameter, result and field of the documented API is described in a Google-style section.

The documented API is what docs/reference/api.md and docs/reference/contracts.md show.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from contracts import SECTIONS  # noqa: E402
from documented_api import documented, gaps  # noqa: E402
from google_docstring import split  # noqa: E402

TODO_API: frozenset[str] = frozenset()
"""Names of docs/reference/api.md whose sections are not written yet."""
TODO_CONTRACTS: frozenset[str] = frozenset(
    {
        "polyaccel.accelerators.base.Accelerator",
        "polyaccel.accelerators.base.Capabilities",
        "polyaccel.accelerators.base.DeviceQueue",
        "polyaccel.accelerators.base.Event",
        "polyaccel.accelerators.base.MemoryStats",
        "polyaccel.accelerators.base.NullEvent",
        "polyaccel.accelerators.base.Stream",
        "polyaccel.accelerators.base.describe",
        "polyaccel.accelerators.base.frameworks_of",
        "polyaccel.accelerators.device_probe.ask_torch",
        "polyaccel.accelerators.device_probe.built_for",
        "polyaccel.accelerators.device_probe.first_existing",
        "polyaccel.accelerators.device_probe.hidden_by",
        "polyaccel.accelerators.device_probe.intel_render_node",
        "polyaccel.accelerators.device_probe.loaded_torch",
        "polyaccel.accelerators.device_probe.torch_build",
        "polyaccel.accelerators.device_probe.unusable",
        "polyaccel.accelerators.device_probe.usable",
        "polyaccel.accelerators.device_probe.works",
        "polyaccel.accelerators.jax_device.JaxAccelerator",
        "polyaccel.accelerators.memory.host.aligned_shift",
        "polyaccel.accelerators.memory.host.keep_freed_memory",
        "polyaccel.accelerators.memory.host.memory_stats",
        "polyaccel.accelerators.memory.host.own_nbytes",
        "polyaccel.accelerators.memory.host.spare_nbytes",
        "polyaccel.accelerators.memory.numpy.NumpyBuffer",
        "polyaccel.accelerators.memory.numpy.allocate_numpy",
        "polyaccel.accelerators.memory.numpy.import_numpy",
        "polyaccel.accelerators.memory.numpy.numpy_dtype",
        "polyaccel.accelerators.memory.numpy.numpy_over",
        "polyaccel.accelerators.memory.numpy.wrap_numpy",
        "polyaccel.accelerators.memory.torch.TorchBuffer",
        "polyaccel.accelerators.memory.torch.allocate_torch",
        "polyaccel.accelerators.memory.torch.dtype_of",
        "polyaccel.accelerators.memory.torch.host_memory",
        "polyaccel.accelerators.memory.torch.import_torch",
        "polyaccel.accelerators.memory.torch.torch_dtype",
        "polyaccel.accelerators.memory.torch.torch_over",
        "polyaccel.accelerators.memory.torch.wrap_torch",
        "polyaccel.accelerators.torch_device.TorchAccelerator",
        "polyaccel.accelerators.torch_device.TorchEvent",
        "polyaccel.accelerators.torch_device.TorchStream",
        "polyaccel.accelerators.torch_device.require_torch_memory",
        "polyaccel.accelerators.torch_device.torch_device_of",
        "polyaccel.checkpoint.storage.base.FileStorage",
        "polyaccel.checkpoint.storage.base.Storage",
        "polyaccel.checkpoint.storage.base.as_storage",
        "polyaccel.checkpoint.storage.base.open_storage",
        "polyaccel.comm.arguments.StridedParts",
        "polyaccel.comm.arguments.bounds_of",
        "polyaccel.comm.arguments.check_dtypes",
        "polyaccel.comm.arguments.check_equal_parts",
        "polyaccel.comm.arguments.check_members",
        "polyaccel.comm.arguments.check_part",
        "polyaccel.comm.arguments.check_reduction",
        "polyaccel.comm.arguments.check_root",
        "polyaccel.comm.arguments.check_whole",
        "polyaccel.comm.arguments.is_own_part",
        "polyaccel.comm.arguments.pieces_of",
        "polyaccel.comm.arguments.shown_counts",
        "polyaccel.comm.backends.torch.backend.TorchBackend",
        "polyaccel.comm.base.CommBackend",
        "polyaccel.comm.base.Communicator",
        "polyaccel.comm.base.Rendezvous",
        "polyaccel.comm.base.StatusStore",
        "polyaccel.comm.base.message_from",
        "polyaccel.comm.base.message_to",
        "polyaccel.comm.base.unusable_error",
        "polyaccel.comm.collective.Collective",
        "polyaccel.comm.collective.closed_error",
        "polyaccel.comm.collective.ended",
        "polyaccel.comm.collectives.p2p.Exchange",
        "polyaccel.comm.collectives.p2p.Message",
        "polyaccel.comm.collectives.p2p.P2PCollectives",
        "polyaccel.comm.collectives.reduction.reduce_parts",
        "polyaccel.comm.collectives.scratch.ScratchPool",
        "polyaccel.comm.collectives.single.SingleCommunicator",
        "polyaccel.comm.composed.ComposedCollectives",
        "polyaccel.comm.objects.ObjectCollectives",
        "polyaccel.comm.rendezvous.ranks.RendezvousGroup",
        "polyaccel.comm.rendezvous.sockets.connect_mesh",
        "polyaccel.comm.work.Background",
        "polyaccel.comm.work.BackgroundWork",
        "polyaccel.comm.work.CombinedWork",
        "polyaccel.comm.work.DeferredWork",
        "polyaccel.comm.work.DoneWork",
        "polyaccel.comm.work.Work",
        "polyaccel.core.buffer.Buffer",
        "polyaccel.core.buffer.BufferViews",
        "polyaccel.core.buffer.CountedBuffer",
        "polyaccel.core.types.DType",
        "polyaccel.core.types.DeviceId",
        "polyaccel.core.types.ParamSpec",
        "polyaccel.core.types.Probe",
        "polyaccel.errors.CommError",
        "polyaccel.errors.ConfigError",
        "polyaccel.errors.PolyaccelError",
        "polyaccel.errors.Problem",
        "polyaccel.launch.base.ElasticHosts",
        "polyaccel.launch.base.Job",
        "polyaccel.launch.base.JobResult",
        "polyaccel.launch.base.LaunchPlan",
        "polyaccel.launch.base.Launcher",
        "polyaccel.launch.base.RankSpec",
        "polyaccel.launch.plan.plan_host",
        "polyaccel.observability.metrics.Alarm",
        "polyaccel.observability.metrics.CallFigures",
        "polyaccel.observability.metrics.JsonlMonitor",
        "polyaccel.observability.metrics.MetricSink",
        "polyaccel.observability.metrics.Monitor",
        "polyaccel.observability.metrics.StepMetrics",
        "polyaccel.observability.metrics.cut_unfinished_line",
        "polyaccel.observability.metrics.json_safe",
        "polyaccel.offload.tier.HostMemory",
        "polyaccel.offload.tier.Tier",
        "polyaccel.offload.tier.TierOptions",
        "polyaccel.ops.base.ArrayMath",
        "polyaccel.ops.base.CastFn",
        "polyaccel.ops.base.DequantizeFn",
        "polyaccel.ops.base.Formula",
        "polyaccel.ops.base.GroupedInputGradFn",
        "polyaccel.ops.base.GroupedLinearFn",
        "polyaccel.ops.base.GroupedWeightGradFn",
        "polyaccel.ops.base.KernelTable",
        "polyaccel.ops.base.LinearFn",
        "polyaccel.ops.base.LinearInputGradFn",
        "polyaccel.ops.base.LinearWeightGradFn",
        "polyaccel.ops.base.MatmulFn",
        "polyaccel.ops.base.MatmulLeftGradFn",
        "polyaccel.ops.base.MatmulRightGradFn",
        "polyaccel.ops.base.Op",
        "polyaccel.ops.base.QuantizeFn",
        "polyaccel.ops.base.ReduceFn",
        "polyaccel.ops.base.Rule",
        "polyaccel.ops.base.ScaleFn",
        "polyaccel.ops.base.SquareSumsFn",
        "polyaccel.ops.base.StochasticRounding",
        "polyaccel.ops.base.UpdateFn",
        "polyaccel.ops.base.code_bits",
        "polyaccel.ops.numpy.kernels.NumpyMath",
        "polyaccel.ops.numpy.kernels.cast",
        "polyaccel.ops.numpy.kernels.combine",
        "polyaccel.ops.numpy.kernels.dequantize",
        "polyaccel.ops.numpy.kernels.numpy_kernels",
        "polyaccel.ops.numpy.kernels.quantize",
        "polyaccel.ops.numpy.kernels.scale",
        "polyaccel.ops.numpy.kernels.square_sums",
        "polyaccel.ops.numpy.kernels.update",
        "polyaccel.ops.numpy.kernels.write_weights",
        "polyaccel.ops.optimizers.Optimizer",
        "polyaccel.ops.optimizers.apply_direction",
        "polyaccel.ops.torch.kernels.cast",
        "polyaccel.ops.torch.kernels.combine",
        "polyaccel.ops.torch.kernels.dequantize",
        "polyaccel.ops.torch.kernels.quantize",
        "polyaccel.ops.torch.kernels.scale",
        "polyaccel.ops.torch.kernels.square_sums",
        "polyaccel.ops.torch.kernels.torch_kernels",
        "polyaccel.ops.torch.kernels.update",
        "polyaccel.testkit.accelerator.contract.AcceleratorContract",
        "polyaccel.testkit.accelerator.kernels.KernelsContract",
        "polyaccel.testkit.accelerator.torch_needs.TorchNeed",
        "polyaccel.testkit.comm.contract.CommContract",
        "polyaccel.testkit.comm.faults.CommFaultContract",
        "polyaccel.testkit.launcher.LauncherContract",
        "polyaccel.testkit.monitor.MonitorContract",
        "polyaccel.testkit.ranks.procs.Doing",
        "polyaccel.testkit.ranks.procs.RankPool",
        "polyaccel.testkit.ranks.procs.work_for_pool",
        "polyaccel.testkit.storage.StorageContract",
        "polyaccel.testkit.tier.TierContract",
        "polyaccel.testkit.tier.in_thread",
    }
)
"""Names of docs/reference/contracts.md whose sections are not written yet."""


def test_the_documented_api_has_sections() -> None:
    todo = TODO_API | TODO_CONTRACTS
    found = [gap for one in documented(SECTIONS) if one.name not in todo for gap in gaps(one)]
    assert found == []


def test_what_is_done_is_not_left_to_do() -> None:
    lacking = {one.name for one in documented(SECTIONS) if any(gaps(one))}
    assert lacking >= TODO_API | TODO_CONTRACTS


def test_a_docstring_is_split_into_sections() -> None:
    doc = split(
        """Return a part.

        More of it.

        Args:
            buffer: The whole. It
                goes on.
            *rest: Others.

        Returns:
            A view, two
            lines.

        Raises:
            ShardingError: It does not fit.
        """
    )
    assert doc.prose == "Return a part.\n\nMore of it."
    assert doc.named["Args"] == {"buffer": "The whole. It goes on.", "*rest": "Others."}
    assert doc.named["Raises"] == {"ShardingError": "It does not fit."}
    assert doc.plain == {"Returns": "A view, two lines."}
