"""polyaccel under the names of DeepSpeed: what the package `deepspeed` of this distribution is made of.

`surface` is the table of names, `modules` makes the modules of it. Nothing here loads torch before it is used.
"""
