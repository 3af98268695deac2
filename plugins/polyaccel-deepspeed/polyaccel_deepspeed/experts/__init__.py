"""Layers of experts as DeepSpeed writes them, over `polyaccel.torch.experts`."""
