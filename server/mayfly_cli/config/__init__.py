"""How a server is configured: by flags, the environment and a file, in this order.

::

    --max-rows 16     MAYFLY_MAX_ROWS=16     max_rows = 16 in mayfly.toml      defaults
          \\___________________|____________________|__________________________/
                               v
    keys      what can be set, its type, bounds and meaning: the one list of all three
    options   the same as options of a command
    loading   values and where each came from; what is wrong with them
    assembly  what the parts of a server are told
    writing   `mayfly config show` and `init`
"""
