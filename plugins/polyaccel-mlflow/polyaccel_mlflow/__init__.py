"""A monitor of polyaccel that writes to MLflow."""
