"""Mixtures of experts: which tokens go to which experts, wherever these are, and what comes back."""
