"""A JAX function as a program: its constants, its units, and at stage 3 the calls that gather and reduce."""
