"""The laboratory: everything that measures, evaluates, replays and trains. Serving never imports it."""
