"""Output that follows a grammar: JSON schemas, regular expressions, choices, Lark, forced tools.

::

    request --- sources ---> llguidance grammar --- compiler ---> a mask of allowed tokens a step
                                   |
                                   +--- schema_errors ---> the faulty place of a JSON schema

llguidance does the work: it computes which tokens may come next, and a sampler draws from those
alone.
"""
