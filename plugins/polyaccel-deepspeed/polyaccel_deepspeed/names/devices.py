"""The names of DeepSpeed's classes of devices: a module each, below `deepspeed.accelerator`."""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import Module, never, yes

_OURS = ("CPU", "CUDA", "MPS", "NPU", "XPU")
_OTHERS = ("HPU", "KLXPU", "MLU", "SDAA", "SUPA")

DEVICES = {
    f"deepspeed.accelerator.{name.lower()}_accelerator": Module(
        "A device.", yes("polyaccel_deepspeed.devices", f"{name}_Accelerator")
    )
    for name in _OURS
} | {
    f"deepspeed.accelerator.{name.lower()}_accelerator": Module(
        "A device.",
        never("no plugin for this device exists; `polyaccel plugins new` begins one", f"{name}_Accelerator"),
    )
    for name in _OTHERS
}
