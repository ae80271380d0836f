"""OpenAI's ``/v1/responses``, without what would have to be stored."""
