"""Real engines behind small functions."""
