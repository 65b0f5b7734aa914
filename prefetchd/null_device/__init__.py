"""A CUDA device that is not there: the shim in C, its launcher, its guard and its part in Python."""
