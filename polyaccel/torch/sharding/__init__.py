"""ZeRO for torch modules: parameters as shards, the hooks that gather them, their gradients and owners."""
