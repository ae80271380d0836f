"""The engine: the part of a worker that runs the model, on one thread and one MLX stream.

======================  =========================================================================
:mod:`.scheduler`       the engine's loop: commands, decode step, prefill chunk, events
:mod:`.sequence`        sequences, commands and events: plain data for other threads, no arrays
:mod:`.prefill`         groups of prompts on their way into the cache
:mod:`.decode`          a batch of sequences that generate, one token a step; log-probabilities
:mod:`.sub_batches`     the decode batch, split in two where lengths differ much
:mod:`.sampler`         one batched sampler with position-keyed random numbers
:mod:`.caches`          merging, splitting and cutting mlx-lm's caches
:mod:`.chunks`          size of the next prefill chunk (no MLX)
:mod:`.admission`       memory budget of running sequences
======================  =========================================================================
"""
