"""The chat model that every framework's LLM class is a shell of: messages in, completions out."""
