"""The plain data that the client, the scheduler and the worker of an engine send each other."""
