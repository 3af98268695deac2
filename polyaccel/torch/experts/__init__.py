"""Mixtures of experts: which tokens go to which experts, wherever these are, and what comes back."""

from polyaccel.torch.experts.layer import Mixture, MixtureOutput, StackedExperts, balance_experts

__all__ = ["Mixture", "MixtureOutput", "StackedExperts", "balance_experts"]
