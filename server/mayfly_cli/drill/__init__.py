"""Parts of ``mayfly drill``, which sends signals to workers under load and reports the effects.

::

    load      clients that stream completions without a pause, and record each chunk's time
    workers   the worker processes of a model: lists them, signals one, waits until all are ready
    report    turns the clients' records and the sent signals into a report
"""
