"""The `Storage` contract and the storages that come with polyaccel: folders, fsspec URLs, folders of each node."""
