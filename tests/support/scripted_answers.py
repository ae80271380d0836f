"""What the scripted models of these tests say, and when."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel

from support.models import tokenizer as tokenizers
from support.models.scripted import Fault, Play

CALL = '<tool_call>\n{"name": "sum", "arguments": {"x": 7, "y": 4}}\n</tool_call>'
SECOND_CALL = '<tool_call>\n{"name": "glob", "arguments": {"pattern": "*.txt"}}\n</tool_call>'
NOT_JSON = "<tool_call>find <k>glob</k><v>*.txt</v></tool_call>"
NOTHING_INSIDE = "<tool_call> \n </tool_call>"
UNKNOWN = '<tool_call>{"name": "format_disk", "arguments": {}}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "sum", "arguments": "7 and 4"}</tool_call>'
CUT_SHORT = '<tool_call>{"name": "sum", "arguments": {"x": 7'

CHARACTERS = "ok 🇫🇷 你好 👩‍👩‍👧‍👦 é 😀!"
"""Characters of one to four bytes, and some that are made of several."""
NEVER_ENDING = "and on " * 400


def byte_ids(text: str) -> list[int]:
    """One token for each byte, so that every character but the plainest takes several."""
    vocabulary = tokenizers.train("plain")
    [(stand_ins, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [vocabulary.token_to_id(stand_in) for stand_in in stand_ins]


OUT_OF_MEMORY = "[malloc] Unable to allocate 1099511627776 bytes."


def plays() -> list[Play]:
    return [
        Play("[text]", "Just text."),
        Play("[call]", CALL),
        Play("[said and called]", f"Let me see.\n{CALL}"),
        Play("[two calls]", f"{CALL}\n{SECOND_CALL}"),
        Play("[not json]", NOT_JSON),
        Play("[nothing inside]", NOTHING_INSIDE),
        Play("[unknown]", UNKNOWN),
        Play("[no object]", NO_OBJECT),
        Play("[cut short]", CUT_SHORT),
        Play("[thinks]", f"<think>Seven, four.</think>{CALL}"),
        Play("[colours]", '["red", "blue"]'),
        Play('"x": 7, "y": 4', "I see seven and four."),
        Play("first piece. second piece.", "Both pieces."),
        Play("[characters]", byte_ids(CHARACTERS)),
        Play("[half]", byte_ids("so 😀")[:-2]),
        Play("[emoji]", byte_ids("hi😀 ok")),
        Play("[on and on]", NEVER_ENDING),
        Play(
            "[short of memory once]",
            "I have enough now.",
            faults=[Fault(at=2, action="raise", message=OUT_OF_MEMORY, times=1)],
        ),
        Play(
            "[short of memory]",
            "I never get there.",
            faults=[Fault(at=2, action="raise", message=OUT_OF_MEMORY)],
        ),
        Play("the sum is 11", "Seven and four make eleven."),
    ]
