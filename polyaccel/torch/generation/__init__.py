"""Generation from a training engine: `engine.generate`, and the weights of a rollout."""
