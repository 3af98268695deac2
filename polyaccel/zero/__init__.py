"""What is sharded over the ranks, and how: the plan in integers, the step on flat buffers."""
