"""Messages in, completions out: what every framework's LLM class is a shell of."""
