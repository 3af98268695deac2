"""Step times and memory against DDP, FSDP2 and DeepSpeed."""
