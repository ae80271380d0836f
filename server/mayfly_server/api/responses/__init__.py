"""OpenAI's ``/v1/responses``, without the parts that need stored responses."""
