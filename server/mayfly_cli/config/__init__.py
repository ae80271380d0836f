"""Configuration of a server by options, environment variables and a file, in this order.

::

    --max-rows 16     MAYFLY_MAX_ROWS=16     max_rows = 16 in mayfly.toml      default
          \\___________________|____________________|__________________________/
                               v
    keys      derives the keys from the settings dataclasses, and makes these from the keys' values
    options   gives the keys to a command as options
    loading   reads and validates the values, and notes the source of each
    models    pools, names and aliases of the configured models
"""
