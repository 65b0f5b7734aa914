"""How each function of the Mamba2 family is called on null-device tensors, one module a function.

Only a traced process imports the modules of this package: they need torch and the kernels' library.
"""
