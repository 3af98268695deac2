"""What training will need, computed from a config and a model's shapes before anything is allocated."""
