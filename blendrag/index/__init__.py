"""Documents in, answers out: what a user without a framework calls."""
