"""The load of a checkpoint: readers, cooperative reads, other names, and storages of each node."""
