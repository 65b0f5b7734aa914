"""How the providers of linear attention call libraries of CuTe kernels: torch's side, imported in the helper.

Each call is noted (`prefetchd.cute.calls`), because that is what a kernel in a library's dict is compiled
from again by a worker that knows no provider.
"""
