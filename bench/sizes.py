"""Sizes of the byte-level GPT. Imports nothing."""

SEQUENCE = 128
"""Tokens (bytes of text) in a sequence."""

SHAPES = {
    "tiny": (2, 128, 4),  # 0.5 M parameters: shows that everything works, measures nothing
    "10m": (6, 384, 6),
    "29m": (9, 512, 8),
    "126m": (10, 1024, 16),
    "1b": (20, 2048, 16),  # for checkpoints: a step takes about a minute
}
"""Layers, width and heads by name."""
