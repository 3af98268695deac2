"""`polyaccel comm`: what ranks recorded of their collectives, and how fast these are."""
