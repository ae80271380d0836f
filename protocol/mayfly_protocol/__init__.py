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
:mod:`mayfly_protocol.transport.sockets` makes the sockets with the options that were found to
matter.
"""

PROTOCOL_VERSION = 1
"""The major version, carried by every frame: a peer of another one is refused. It changes when a
message changes its meaning."""

PROTOCOL_MINOR = 1
"""Grows with what is added. Peers of one major version understand each other, whichever is older:

* fields are only ever appended, with defaults that mean what was meant before there was the field;
  who does not know a field ignores it;
* a new message goes to nobody who has not said that he knows it. A node says so in its rosters
  (``Roster.minor``), and front ends, which begin every exchange, obey
  (:func:`mayfly_protocol.codec.understood`). Neither a worker nor a reaper sends a new message
  unless one that is as new has asked for it, and none is ever a new way to end a request.

So nodes and front ends are upgraded one by one, in any order, while they serve.
"""
