"""Shadow runs: a few steps of a user's program without the engine's rewrites, compared with the engine's own."""
