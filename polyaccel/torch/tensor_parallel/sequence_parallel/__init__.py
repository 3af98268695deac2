"""Tokens that tensor ranks share between the layers that are cut: Megatron's sequence parallelism."""
