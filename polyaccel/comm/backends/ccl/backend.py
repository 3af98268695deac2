"""The backend `ccl`: collectives between host buffers by Intel's oneCCL, on one host or several."""

from __future__ import annotations

from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.backends.ccl.communicator import CclCommunicator
from polyaccel.comm.backends.ccl.library import probe_library
from polyaccel.comm.base import API_VERSION, CommBackend, Communicator, Rendezvous, unusable_error
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.registry import PluginGroup, load_plugin


class CclBackend(CommBackend):
    """Rendezvous is over gloo, which also carries messages; collectives go through oneCCL.

    `available_collectives` are what oneCCL itself does, in DeepSpeed's names. Small all-reduces are
    `all_reduce_caching`: oneCCL keeps the plan of each size. `inference_all_reduce` is an all-reduce like any other.
    """

    name: ClassVar[str] = "ccl"
    available_collectives: ClassVar[tuple[str, ...]] = (
        *("all_gather_into_tensor", "all_reduce", "all_reduce_caching", "all_to_all_single", "barrier"),
        *("broadcast", "inference_all_reduce", "reduce_scatter_tensor"),
    )

    @classmethod
    def probe(cls) -> Probe:
        probe = probe_library()
        meeting = _messages().probe()
        if not probe.usable:
            return probe
        if not meeting.usable:
            return Probe(False, f"the rendezvous is gloo's: {meeting.reason}")
        return Probe(True, f"{probe.reason} does {', '.join(cls.available_collectives)}")

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        probe = self.probe()
        reason = probe.reason
        if probe.usable and accelerator.current_device().type != "cpu":
            reason = f"it moves host memory, and {accelerator.name} has its own memory"
        elif probe.usable:
            messages = _messages()().connect(rendezvous, accelerator, timeout_s=timeout_s)
            if messages.world_size == 1:
                return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
            return CclCommunicator.connect(messages, accelerator, timeout_s)
        raise unusable_error(self.name, reason)


def _messages() -> type[CommBackend]:
    """The backend of the rendezvous and of messages."""
    plugin: type[CommBackend] = load_plugin(PluginGroup.COMM, "gloo", CommBackend, API_VERSION)
    return plugin
