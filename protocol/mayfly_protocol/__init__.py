"""Messages between Mayfly's processes.

Three conversations cross a process border, and each has its module of message types:

====================  ==========================  ==============================
between               sockets                     module
====================  ==========================  ==============================
worker and reaper     DEALER -> ROUTER            :mod:`mayfly_protocol.lifecycle`
front end and worker  DEALER -> ROUTER            :mod:`mayfly_protocol.serving`
reaper to all         XPUB -> SUB                 :mod:`mayfly_protocol.roster`
====================  ==========================  ==============================

:mod:`mayfly_protocol.requests` holds the parts of ``Submit`` that a client asks for,
:mod:`mayfly_protocol.counters` the counters in ``Beat`` and ``SlotView``.
:mod:`mayfly_protocol.codec` turns messages into frames and back;
:mod:`mayfly_protocol.transport.sockets` sets the sockets' options.
"""

PROTOCOL_VERSION = 1
"""The major version, in every frame: a peer of another one is refused. It changes when a message
changes its meaning."""

PROTOCOL_MINOR = 1
"""The minor version, which grows with every addition. Peers of one major version understand each
other, whichever is older:

* fields are only ever appended, with defaults that mean what was meant before the field existed; a
  peer that does not know a field ignores it;
* a new message is sent only to a peer that has announced that it knows it. A node announces its
  minor version in its rosters (``Roster.minor``), and front ends, which begin every exchange, send
  it nothing newer (:func:`mayfly_protocol.codec.understood`). A worker or a reaper sends a new
  message only in answer to a peer that is as new, and no new message ends a request.

So nodes and front ends are upgraded one by one, in any order, while they serve.
"""
