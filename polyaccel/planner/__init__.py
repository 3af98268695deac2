"""The needs of a training run, computed from a config and a model's shapes before anything is allocated."""
