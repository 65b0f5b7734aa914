"""Compile workers forked from a process that has imported the kernels and never used them."""
