"""Layers that ranks share: tensor parallelism of torch modules over a Communicator."""
