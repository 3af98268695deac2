"""What DeepSpeed has, or had, and polyaccel has in another way: reasons that several answers "no" give."""

from __future__ import annotations

COMPRESSION = "compression_training quantises layers by one schedule for each group, whatever their eigenvalues"
LOCO = "gradients are quantised without an error that is carried on"
NARROW_MASTERS = "master weights and optimizer states are float32"
SUPER_OFFLOAD = "offload_optimizer updates on the host, without SuperOffload's overlap"
ZENFLOW = "offload_optimizer updates on the host, without ZenFlow's choice of gradients"

TO_COME = (*(COMPRESSION, LOCO, NARROW_MASTERS, SUPER_OFFLOAD, ZENFLOW),)
"""All of them. A feature that exists takes its reason away; none is added."""
