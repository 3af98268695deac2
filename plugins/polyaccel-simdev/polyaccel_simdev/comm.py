"""The comm plugin: a backend of torch.distributed that another module registers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from polyaccel.comm.backends.torch.backend import TorchBackend


class SimcommBackend(TorchBackend):
    """`simcomm` of `torch.distributed`: device tensors through host memory and gloo."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)
    name: ClassVar[str] = "simcomm"
    modules: ClassVar[Mapping[str, str]] = MappingProxyType({"simdev": "polyaccel_simdev.device"})
