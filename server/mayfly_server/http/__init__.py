"""What stands between a network and the API: who may come in, from where, and how much of whom.

::

    connection   protocol   bounds on bytes, time and number; transport: closing;
        |                   parsing: wishes for another protocol
    request id   (api.request_id)
    expectations bodies that wait until they are asked for
    hosts        the name that a request is for: DNS rebinding
    origins      the site that a browser's request comes from
    gate         keys, and what each may do how often
    body limit   (api.body)
    redirects    of addresses with a slash too many
        v
    the routes
"""
