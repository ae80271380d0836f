"""Output that follows a grammar: JSON schemas, regular expressions, choices, Lark, forced tool
calls.

::

    request --- sources ---> llguidance grammar --- compiler ---> a mask of allowed tokens a step
                                   |
                                   +--- schema_errors ---> the faulty place of a JSON schema

The library llguidance computes which tokens may come next, and the sampler draws from these tokens
alone.
"""
