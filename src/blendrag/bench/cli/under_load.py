"""``bench sweep``, ``load`` and ``beside``: what the time depends on, and many requests at once."""
