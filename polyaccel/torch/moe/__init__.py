"""Mixtures of experts: which tokens go to which experts, wherever these are, and what comes back."""

from polyaccel.torch.moe.balance import balance_experts
from polyaccel.torch.moe.layer import MixtureOutput, MoELayer, StackedExperts

__all__ = ["MixtureOutput", "MoELayer", "StackedExperts", "balance_experts"]
