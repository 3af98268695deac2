"""Groups of backends whose calls run in streams of a device, such as nccl, with gloo for what hosts agree on."""

from __future__ import annotations

from logging import getLogger

import torch.distributed as dist

from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.backends.torch.communicator import TorchCommunicator, name_of_split, new_group
from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError

log = getLogger(__name__)


class DeviceCommunicator(TorchCommunicator):
    """A torch process group whose collectives a device carries out."""

    def new_host_group(self) -> Communicator | None:
        if self.accelerator.works_on_host_memory:
            return None
        name, everybody = name_of_split(self.group), self.world_size == dist.get_world_size()
        made, failure = None, ""
        try:
            made = new_group(self.ranks, "gloo", self.timeout_s, everybody=everybody, name=name)
        except CommError as error:
            failure = error.message
        failures = [each for each in self.all_gather_object(failure) if each]
        if made is None or failures:
            if made is not None:
                dist.destroy_process_group(made)
            if self.rank == 0:
                log.info("ranks agree over %s, which waits for the device: %s", self.backend, *failures[:1])
            return None
        return ExchangeCommunicator(made, self.ranks, host_accelerator(self.accelerator), "gloo", self.timeout_s)
