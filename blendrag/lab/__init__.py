"""Everything that measures, evaluates, replays, trains and draws. Serving never imports it."""
