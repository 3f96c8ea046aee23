"""Looking after an index that nobody has open: no engine, no model."""
