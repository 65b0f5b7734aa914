"""prefetchd: a serving engine never compiles a kernel in its own process while requests wait for it."""

__version__ = "0.1.0"
