"""The save of a checkpoint: the protocol of ranks, its writer, the writing process, and storages of each node."""
