"""The part of a worker that computes: one thread, one MLX stream, all the arrays.

=====================  ==========================================================================
:mod:`.types`          requests, rows and events: what crosses to the I/O thread, without arrays
:mod:`.noise`          position-keyed random keys
:mod:`.sampler`        one batched sampler for all running rows
:mod:`.prefill`        prompts on their way into the cache, a group of rows at a time
:mod:`.decode`         the rows that generate, one token a step
:mod:`.lanes`          those rows in one batch or two, by their lengths
:mod:`.chunks`         how large the next prefill chunk may be (pure)
:mod:`.admission`      which waiting request may start (pure)
:mod:`.loop`           the thread that puts them together
=====================  ==========================================================================
"""
