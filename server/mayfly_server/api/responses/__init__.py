"""OpenAI's ``/v1/responses``, without the features that need responses stored on the server."""
