"""The backends of torch.distributed: gloo, nccl, xccl, hccl, and those that packages register with it."""
