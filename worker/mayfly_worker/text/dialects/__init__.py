"""Output dialects: the forms in which families of models write tool calls and thoughts."""
