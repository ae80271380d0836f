"""HTTP below the API routes: limits on connections, and the middleware that checks every request.

::

    connection          protocol     limits on bytes, time and number; slow closing; upgrades
        |
    HeadAsGet           middleware   answers HEAD as GET without the body
    HttpMetrics         middleware   counts requests by route, status and error
    RequestId           middleware   gives the request an id
    Expect100           middleware   closes a connection whose client waits for "100 Continue"
    TrustedHosts        hosts        checks the Host header, against DNS rebinding
    CORS, OriginCheck   origins      checks the web site that a browser's request comes from
    AuthMiddleware      auth         checks API keys and their rate limits (rate_limit)
    BodyLimit           middleware   limits the length of a body
    RelativeRedirects   middleware   makes redirects of paths with a superfluous slash relative
        v
    the routes
"""
