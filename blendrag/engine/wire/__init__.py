"""What the client, the scheduler and the worker of an engine tell each other: plain data."""
