"""What Mayfly's processes say to each other.

Three conversations cross a process border, and each has its module of message types:

====================  ==========================  ==============================
between               sockets                     module
====================  ==========================  ==============================
worker and reaper     DEALER -> ROUTER            :mod:`mayfly_protocol.lifecycle`
front end and worker  DEALER -> ROUTER            :mod:`mayfly_protocol.serving`
reaper to all         XPUB -> SUB                 :mod:`mayfly_protocol.roster`
====================  ==========================  ==============================

What a client asks of a model (:mod:`mayfly_protocol.requests`) is part of ``Submit``.
:mod:`mayfly_protocol.codec` turns messages into frames and back;
:mod:`mayfly_protocol.sockets` makes the sockets with the options that were found to matter.
"""

PROTOCOL_VERSION = 1
"""Carried by every frame. Fields are only ever appended, with defaults, so a newer peer of the
same version is understood; a message that changes its meaning needs a new number."""
