"""Replies for scripted models (models that say what a test tells them to), each with the trigger:
the words in a prompt that make the model say this reply."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel

from support.models import tokenizer as tokenizers
from support.models.scripted import ModelFault, ScriptedReply

CALL = '<tool_call>\n{"name": "sum", "arguments": {"x": 7, "y": 4}}\n</tool_call>'
SECOND_CALL = '<tool_call>\n{"name": "glob", "arguments": {"pattern": "*.txt"}}\n</tool_call>'
NOT_JSON = "<tool_call>find <k>glob</k><v>*.txt</v></tool_call>"
NOTHING_INSIDE = "<tool_call> \n </tool_call>"
UNKNOWN = '<tool_call>{"name": "format_disk", "arguments": {}}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "sum", "arguments": "7 and 4"}</tool_call>'
CUT_SHORT = '<tool_call>{"name": "sum", "arguments": {"x": 7'

CHARACTERS = "ok 🇫🇷 你好 👩‍👩‍👧‍👦 é 😀!"
"""Text with characters of one to four UTF-8 bytes, and some made of several code points."""
NEVER_ENDING = "and on " * 400


def byte_ids(text: str) -> list[int]:
    """Returns token ids of a text with one token for each UTF-8 byte, so that every character
    outside ASCII is split over several tokens."""
    vocabulary = tokenizers.train("plain")
    [(stand_ins, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [vocabulary.token_to_id(stand_in) for stand_in in stand_ins]


OUT_OF_MEMORY = "[malloc] Unable to allocate 1099511627776 bytes."


def scripted_replies() -> list[ScriptedReply]:
    return [
        ScriptedReply("[text]", "Just text."),
        ScriptedReply("[call]", CALL),
        ScriptedReply("[said and called]", f"Let me see.\n{CALL}"),
        ScriptedReply("[two calls]", f"{CALL}\n{SECOND_CALL}"),
        ScriptedReply("[not json]", NOT_JSON),
        ScriptedReply("[nothing inside]", NOTHING_INSIDE),
        ScriptedReply("[unknown]", UNKNOWN),
        ScriptedReply("[no object]", NO_OBJECT),
        ScriptedReply("[cut short]", CUT_SHORT),
        ScriptedReply("[thinks]", f"<think>Seven, four.</think>{CALL}"),
        ScriptedReply("[colours]", '["red", "blue"]'),
        ScriptedReply('"x": 7, "y": 4', "I see seven and four."),
        ScriptedReply("first piece. second piece.", "Both pieces."),
        ScriptedReply("[characters]", byte_ids(CHARACTERS)),
        ScriptedReply("[half]", byte_ids("so 😀")[:-2]),
        ScriptedReply("[emoji]", byte_ids("hi😀 ok")),
        ScriptedReply("[on and on]", NEVER_ENDING),
        ScriptedReply(
            "[short of memory once]",
            "I have enough now.",
            faults=[ModelFault(at=2, action="raise", message=OUT_OF_MEMORY, times=1)],
        ),
        ScriptedReply(
            "[short of memory]",
            "I never get there.",
            faults=[ModelFault(at=2, action="raise", message=OUT_OF_MEMORY)],
        ),
        ScriptedReply("the sum is 11", "Seven and four make eleven."),
    ]
