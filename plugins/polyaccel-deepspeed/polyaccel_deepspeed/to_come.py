"""What DeepSpeed has, or had, that polyaccel is to have and has not: the reasons of every answer "not yet"."""

from __future__ import annotations

COMPRESSION = "it does not exist here; compression_training quantises layers by one schedule for each group"
LOCO = "gradients are quantised without an error that is carried on"
MUON = "the config's \"Muon\" works, DeepSpeed's class and its tags of heads do not exist here"
NARROW_MASTERS = "master weights and optimizer states are float32"
SUPER_OFFLOAD = "offload_optimizer updates on the host, without SuperOffload's overlap"
ZENFLOW = "offload_optimizer updates on the host, without ZenFlow's choice of gradients"

TO_COME = (*(COMPRESSION, LOCO, MUON, NARROW_MASTERS, SUPER_OFFLOAD, ZENFLOW),)
"""All of them. A feature that exists takes its reason away; none is added."""
