"""The routes of OpenAI's chat completions, completions and models, and of vLLM's tokenize and
detokenize."""
