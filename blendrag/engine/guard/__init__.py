"""What the guard against slow loading knows of the engine's own prefills."""
