"""Prefix cache: reuse of the KV state of earlier prompts that share a prefix with a new one.

``radix`` matches token sequences and knows nothing of models, ``layers`` copies and trims mlx-lm's
per-layer caches, ``store`` combines both into the prefix cache.
"""

from mayfly_worker.prefix_cache.store import EntryKind, PrefixCache, PrefixCacheStats, PrefixHit

__all__ = ["EntryKind", "PrefixCache", "PrefixCacheStats", "PrefixHit"]
