"""Text in and out of a model: prompts to token ids, token ids to what a client reads.

::

    Prompt --- prompts.render ---> token ids

    token id --> Detokenizer --> text --> StopMatcher --> text --> OutputParser --> content,
                                                                reasoning, tool calls
                '------------------- choice.ChoiceText -------------------'

Nothing here knows of batches, threads or sockets. Everything is a function of the request and of
the ids so far, so that a choice can be replayed on another worker and go on as if nothing happened.
"""
