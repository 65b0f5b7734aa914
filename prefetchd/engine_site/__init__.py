"""The directory that `prefetchd run` puts in front of an engine's PYTHONPATH."""
