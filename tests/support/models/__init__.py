"""Models for tests: built in seconds, from nothing but what is installed.

:mod:`models.tiny` makes random-weight models of several architectures, :mod:`models.scripted` a
model that says what a test tells it to (and fails when it tells it to), and
:mod:`models.tokenizer` the real byte-level tokenizer that both come with.
"""
