"""A step of transformers' Trainer, with our `deepspeed` and with DeepSpeed's."""
