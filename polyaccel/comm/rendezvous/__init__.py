"""The ranks of a job that have met and have no communicator yet: what they tell each other, and how they connect."""
