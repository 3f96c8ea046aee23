"""The index that a user without a framework calls: documents in, answers out."""
