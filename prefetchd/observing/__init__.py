"""The observer's adaptors, one a compile system, and what carries their reports off the engine's thread."""
