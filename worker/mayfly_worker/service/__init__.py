"""The part of a worker that talks: sockets, requests and their text, on the main thread.

=====================  ==========================================================================
:mod:`.prepare`        a submitted request turned into rows for the engine (in a small pool)
:mod:`.session`        one request's life on this worker, without sockets
:mod:`.desk`           all sessions: admission, engine events in, messages out
:mod:`.outbox`         what is still owed to each front end, bounded
:mod:`.engine_thread`  loading, running and rebuilding the engine on its own thread
:mod:`.process`        the process: sockets, signals, the death pipe, the exit
=====================  ==========================================================================
"""
