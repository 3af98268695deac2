"""The functions that users of torch.distributed and deepspeed.comm call."""
