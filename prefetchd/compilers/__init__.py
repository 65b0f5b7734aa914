"""How kernels are compiled and cached, one module a compile system. Cache layouts are known here only."""
