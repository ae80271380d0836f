"""Messages between Mayfly's processes.

A front end serves HTTP, a worker runs a model, and a reaper starts and watches the workers of a
node, which is usually one machine. Each pair of them has its module of message types:

====================  ==========================  ==============================
between               sockets                     module
====================  ==========================  ==============================
worker and reaper     DEALER -> ROUTER            :mod:`mayfly_protocol.lifecycle`
front end and worker  DEALER -> ROUTER            :mod:`mayfly_protocol.serving`
reaper to all         XPUB -> SUB                 :mod:`mayfly_protocol.roster`
====================  ==========================  ==============================

:mod:`mayfly_protocol.requests` holds the parts of a client's request (``Submit``),
:mod:`mayfly_protocol.counters` the counters in ``Beat`` and ``SlotView``.
:mod:`mayfly_protocol.codec` turns messages into frames and back;
:mod:`mayfly_protocol.transport.sockets` sets the sockets' options.
"""

PROTOCOL_VERSION = 1
"""Major version of the message protocol, sent in every frame; a process refuses frames of another
major version. The number changes when an existing message changes its meaning."""

PROTOCOL_MINOR = 1
"""Minor version of the message protocol, which grows with every addition. Processes of one major
version understand each other, whichever is older:

* fields are only ever appended to messages, with defaults that mean what was meant before the field
  existed; a process ignores fields that it does not know;
* a new message is sent only to a process that has announced that it knows the message. A node (a
  reaper with its workers) announces its minor version in its rosters (``Roster.minor``), and front
  ends, which begin every exchange, send the node no newer message
  (:func:`mayfly_protocol.codec.understood`). A worker or a reaper sends a new message only in
  answer to a process that is as new, and no new message ends a request.

So nodes and front ends can be upgraded one by one, in any order, while they serve.
"""
