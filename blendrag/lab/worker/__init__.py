"""What the laboratory adds to the engine's worker."""
