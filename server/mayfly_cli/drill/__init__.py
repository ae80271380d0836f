"""What ``mayfly drill`` is made of.

::

    load      clients that stream completions without a pause, and note what came when
    workers   the processes of a pool: which there are, striking one, waiting for all to serve
    report    from what clients saw and what was struck to numbers for people
"""
