"""How each DeepGEMM entry point is called on null-device tensors, one module a group of ops.

Only a traced process imports the modules of this package: they need torch and the library.
"""
