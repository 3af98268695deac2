"""The contracts of communicators: subclass `CommContract`, and `CommFaultContract` for ranks that fail."""

from polyaccel.testkit.comm.contract import CommContract as CommContract
from polyaccel.testkit.comm.faults import CommFaultContract as CommFaultContract

__all__ = ["CommContract", "CommFaultContract"]
