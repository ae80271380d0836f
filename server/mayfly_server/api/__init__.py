"""The HTTP routes: a folder for each API (OpenAI's completions, its responses, Anthropic's
messages, administration) beside the modules that all APIs share."""
