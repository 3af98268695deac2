"""What is wrong with a run, said in one sentence with its cure, as soon as its figures show it."""
