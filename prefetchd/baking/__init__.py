"""Baking: a whole engine on the null device says which kernels it launches, and they are made with no GPU."""
