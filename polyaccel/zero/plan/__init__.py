"""The plan of a step, in integers only: policy, layout, the buffers of each bucket, and their sums."""
