"""Parts of ``mayfly drill``.

::

    load      clients that stream completions without a pause, and record when each chunk came
    workers   the processes of a pool: lists them, sends a signal to one, waits until all serve
    report    turns the clients' records and the sent signals into a report
"""
