"""A CUDA device that is not there: the shim's C sources, its launcher, its guard and what it does inside Python."""
