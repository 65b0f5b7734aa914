"""CuTe DSL kernels in an engine: found in a store by the key the engine itself uses, else compiled as ever.

The engine side and the helper share these modules. None of them imports torch, cutlass or tvm_ffi when it is
imported; what needs them runs in a process where the engine's library has brought them.
"""
