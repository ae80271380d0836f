"""From a request to token ids, and from token ids to what a client reads.

::

    Prompt -- prompts.Prompts --> token ids

    token id -- detokenize --> text -- stops --> text -- parts --> content, reasoning, tool calls
              '------------------- choice.ChoiceText ------------------'

Nothing here knows of batches, threads or sockets. Everything is a function of the request and of
the ids so far, so that a choice can be replayed on another worker and go on as if nothing happened.
"""
