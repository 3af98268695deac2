"""What is wrong with a run, reported in one sentence with its hint, as soon as its figures show it."""
