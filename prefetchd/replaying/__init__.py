"""Replay: what engines compiled themselves, compiled again ahead of the next start, from their shape logs."""
