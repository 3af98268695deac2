"""Several hosts on this machine: how long a job takes to start, and what a step between hosts costs."""
