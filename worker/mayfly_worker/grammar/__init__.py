"""Output that follows a grammar: JSON schemas, regular expressions, choices, Lark, forced tools.

llguidance does the work: it says which tokens may come next, and a sampler draws only from those.
"""

from mayfly_worker.grammar.grammars import Compiled, Grammars, Matcher

__all__ = ["Compiled", "Grammars", "Matcher"]
