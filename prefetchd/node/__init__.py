"""The daemon's parts, one concern a module; `prefetchd/daemon.py` puts them together."""
