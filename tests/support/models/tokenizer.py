"""Trains a real byte-level BPE tokenizer for the tests' models, which takes a moment and always
gives the same tokenizer.

Three kinds exist. ``plain`` has a ChatML template without tools. ``tools`` has ``<tool_call>`` and
``</tool_call>`` in its vocabulary (as ordinary, not special, tokens) and a template in the style of
Qwen and Hermes, from which mlx-lm infers its JSON tool parser. ``thinking`` also has ``<think>``
and ``</think>``, and its template adds an empty pair of these if ``enable_thinking`` is false.

The templates are as strict as real ones: they iterate a tool call's arguments as a mapping, so that
arguments that are still JSON text fail, and they raise for an unknown role.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Kind = Literal["plain", "tools", "thinking"]

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
TOOL_MARKERS = ("<tool_call>", "</tool_call>")
THINK_MARKERS = ("<think>", "</think>")
ASSISTANT_HEADER = f"{START}assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

TRAINED_VOCABULARY = 1800
"""Size of the tokenizer's vocabulary before the markers of tools and reasoning are added."""

_SCRIPTS = """
你好，世界。今天天气很好，我们去公园散步吧。東京は夜の七時、人々は家に帰ります。
안녕하세요, 반갑습니다. Привет, как дела? Γειά σου Κόσμε. مرحبا بالعالم नमस्ते दुनिया
Zażółć gęślą jaźń. Él niño comió piñas. Straße, Œuvre, naïve café. 😀🎉👍🏽👩‍👩‍👧‍👦🇫🇷🚀❤️
"""

_PLAIN_TEMPLATE = """\
{%- if with_date %}
{{- '<|im_start|>system\\nToday is ' + strftime_now('%Y-%m-%d') + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}
{{- raise_exception('Unknown role: ' + message.role) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TOOLS_TEMPLATE = """\
{%- if with_date %}
{{- '<|im_start|>system\\nToday is ' + strftime_now('%Y-%m-%d') + '<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call one or more functions.\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a JSON object with its name and arguments:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not (tools and loop.first) %}
{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": {' }}
{%- for name, value in tool_call.arguments | items %}
{{- name | tojson }}: {{ value | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}
{{- '}}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- raise_exception('Unknown role: ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}THINKING{% endif %}"""

_NO_THOUGHT = "{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"

TEMPLATES: dict[Kind, str] = {
    "plain": _PLAIN_TEMPLATE,
    "tools": _TOOLS_TEMPLATE.replace("THINKING", ""),
    "thinking": _TOOLS_TEMPLATE.replace("THINKING", _NO_THOUGHT),
}


STRICT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""A template in the shape of Qwen 3.5's: it takes one system message, at the start."""


def _corpus() -> list[str]:
    code = [inspect.getsource(module) for module in (argparse, textwrap, json.decoder)]
    records = [
        json.dumps({"name": f"item {n}", "size": n * 1.5, "tags": ["a", "b"], "ok": n % 2 == 0})
        for n in range(50)
    ]
    return [*code, *records, _SCRIPTS, _SCRIPTS]


@lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer.to_str()


def train(kind: Kind) -> Tokenizer:
    """Returns the tests' tokenizer of this kind ("plain", "tools" or "thinking"). Ids 0 to 2 are
    the special tokens, 3 to 258 the 256 bytes."""
    tokenizer = Tokenizer.from_str(_trained())
    markers = {"plain": (), "tools": TOOL_MARKERS, "thinking": TOOL_MARKERS + THINK_MARKERS}[kind]
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in markers])
    return tokenizer


def save(folder: Path, kind: Kind, *, context: int, template: str | None = None) -> Tokenizer:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` of the tests' tokenizer into
    ``folder``; ``context`` is the model's context length in tokens.

    ``template`` replaces the kind's chat template; with an empty one the tokenizer has none.
    """
    tokenizer = train(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[kind] if template is None else template,
    }
    if not config["chat_template"]:
        del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer
