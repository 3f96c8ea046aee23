"""The maintenance of an index that nobody has open: no engine, no model."""
