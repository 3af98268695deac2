"""`polyaccel ckpt`: a folder of verbs for checkpoints, a file each."""
