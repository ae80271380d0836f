"""Models for tests, built in seconds without any download.

:mod:`models.tiny` makes random-weight models of several architectures. :mod:`models.scripted` makes
a model that says what a test tells it to, and fails when a test tells it to.
:mod:`models.tokenizer` makes the byte-level tokenizer of both.
"""
