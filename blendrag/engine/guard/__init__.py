"""The times of the engine's own prefills, which the guard against slow loading compares with loads."""
