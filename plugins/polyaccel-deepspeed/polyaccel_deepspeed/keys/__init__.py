"""Config keys of DeepSpeed that polyaccel has by another name, has no use for, or refuses for good."""
