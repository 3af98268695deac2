"""Forward passes whose numbers for a sequence do not depend on the batch that it is in."""
