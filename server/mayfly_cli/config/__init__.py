"""Configuration of a server by options, environment variables and a file; options are strongest.

::

    --max-rows 16     MAYFLY_MAX_ROWS=16     max_rows = 16 in mayfly.toml      default
          \\___________________|____________________|__________________________/
                               v
    keys      derives the keys from the settings dataclasses, and builds settings from keys' values
    options   makes a command's options from the keys
    loading   reads and validates the keys' values, and notes the source of each value
    models    worker settings, names and aliases of the configured models
"""
