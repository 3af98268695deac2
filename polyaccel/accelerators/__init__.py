"""Accelerators: the contract (`base`), the choice among those present (`detect`), and one small file a device."""

from polyaccel.accelerators.detect import choose_accelerator as choose_accelerator
from polyaccel.accelerators.detect import get_accelerator as get_accelerator
from polyaccel.accelerators.detect import set_accelerator as set_accelerator
