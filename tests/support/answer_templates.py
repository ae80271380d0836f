"""Chat templates in the shapes of published ones, for tests of answers that come back, and texts as
their models write them."""

from __future__ import annotations

HEAD = """\
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>assistant\\n' }}{% set content = message.content %}
"""
FOOT = """\
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}OPEN{% endif %}"""
CALLS = """\
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}
{%- if content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
"""


SPACED = """\
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}{{- message.content }}
"""
"""Whitespace of the template's own around the thought, and nothing stripped, as MiniMax M2 has."""

STRIPPED = """\
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}{{- message.content.lstrip('\\n') }}
"""
"""As Qwen 3 has: line ends in the messages are dropped."""

PARSED = """\
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip() %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- content }}
"""
"""Thoughts are taken out of the content, as Nemotron's template does."""

PARTED = """\
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content.blocks or content %}
{%- if part.type == KIND %}{{- '<think>' + (part.thinking or part.text) + '</think>' }}
{%- else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}
"""
"""Thoughts are parts of the content, of the type KIND, as in Ministral's template and Apertus's."""

FIELDS = {
    "reasoning": SPACED.replace("reasoning_content", "reasoning"),
    "thinking": SPACED.replace("reasoning_content", "thinking"),
    "tool_plan": SPACED.replace("reasoning_content", "tool_plan"),
}
THINKING = {"spaced": SPACED, "stripped": STRIPPED, "parsed": PARSED, **FIELDS}


def with_answers(answer: str, *, opening: str = "") -> str:
    """A template that prints the assistant's messages by ``answer``, and ends prompts with
    ``opening``."""
    return HEAD + answer + FOOT.replace("OPEN", "{{- '" + opening + "' }}" if opening else "")


JOINED = """\
{{- message.content }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call['arguments'] + '}\\n</tool_call>' }}
{%- endfor %}
"""


KIMI = """\
{%- set answered = namespace(ids=[]) %}
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{% endif %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{%- set _ = answered.ids.append(call['id']) %}
{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""In the shape of Kimi K2's: a call is named by its id, and the template changes a list."""


def kimi_calls(*ids: str) -> str:
    calls = "".join(
        f'<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{"x": 7}}<|tool_call_end|>'
        for id in ids
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


SHORT = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""In the shape of Mistral's: ids of nine letters and digits."""

CALL = '<tool_call>\n{"name": "sum", "arguments": {"x": 7, "y": [1.5, "é\\n"]}}\n</tool_call>'
THOUGHT = "<think>\nI add.\n</think>\n\n"

ANSWERS = {kind: answer + CALLS for kind, answer in THINKING.items()} | {"joined": JOINED}


def answering(kind: str) -> str:
    """The template of a ``kind`` of :data:`ANSWERS`."""
    return with_answers(ANSWERS[kind])


HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{- tool.function.name + '\\n' }}{% endfor %}{{- '<|end|>' }}{% endif %}
{%- set called = namespace(name='') %}
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set rest = loop.index %}{% set call = message.tool_calls[0].function %}
{%- if content and message.thinking %}{{- raise_exception('one of both') }}{% endif %}
{%- set ended = messages[rest:] | rejectattr('tool_calls', 'defined')
    | selectattr('role', 'equalto', 'assistant') | list %}
{%- set thought = content or message.thinking %}
{%- if thought and not ended %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}{% set called.name = call.name %}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + content + '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""As gpt-oss has: one call in a message, whose name its result gets, and no thoughts of earlier
answers but those before calls that no answer has followed."""
