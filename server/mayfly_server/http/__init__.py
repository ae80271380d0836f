"""HTTP in front of the API: limits on connections, and the middleware that checks every request.

::

    connection          protocol     limits on bytes, time and number; slow closing; upgrades
        |
    HttpMetrics         middleware   counts requests by route, status and error
    RequestId           middleware   gives the request an id
    Expect100           middleware   closes after an answer to a body that was not asked for
    TrustedHosts        hosts        the name that a request is for: DNS rebinding
    CORS, OriginCheck   origins      the site that a browser's request comes from
    AuthMiddleware      auth         keys, and how much each may ask for (rate_limit)
    BodyLimit           middleware   the body's length
    RelativeRedirects   middleware   redirects of addresses with a slash too many
        v
    the routes
"""
