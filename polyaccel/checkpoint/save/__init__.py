"""The save of a checkpoint: the protocol of ranks, its writer, the process beside a rank, and storages of each node."""
