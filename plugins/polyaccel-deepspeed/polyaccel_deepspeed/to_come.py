"""What DeepSpeed has, or had, and polyaccel has in another way: reasons that several answers "no" give."""

from __future__ import annotations

SUPER_OFFLOAD = "offload_optimizer updates on the host, without SuperOffload's overlap"
ZENFLOW = "offload_optimizer updates on the host, without ZenFlow's choice of gradients"

TO_COME = (SUPER_OFFLOAD, ZENFLOW)
"""All of them. A feature that exists takes its reason away; none is added."""
