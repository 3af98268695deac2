"""A simulated accelerator. Importing this registers nothing; `polyaccel_simdev.device` does."""
