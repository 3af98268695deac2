"""The life of a bucket: parameters gathered and freed, gradients filled in and reduced."""
