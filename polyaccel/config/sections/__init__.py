"""The sections of the config, a file each."""
