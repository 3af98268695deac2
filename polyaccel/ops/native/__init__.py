"""The compiled ops of csrc/."""
