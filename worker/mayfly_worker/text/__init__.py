"""Text in and out of a model: prompts to token ids, token ids to what a client reads.

::

    Prompt --- prompts.render ---> token ids

    token id --> Detokenizer --> text --> StopMatcher --> text --> OutputParser --> content,
                                                                reasoning, tool calls
                '------------------- choice.ChoiceText -------------------'

This package knows nothing of batches, threads or sockets. Its results are functions of the request
and of the ids generated so far, so that another worker can replay a choice and continue it.
"""
