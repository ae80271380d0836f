"""A model that says what a test tells it to, and fails when it tells it to.

::

    build(folder, [
        Play("weather?", 'Sunny.'),
        Play("[boom]", "one two three", faults=[Fault(at=2, action="abort", message="...")]),
    ])

A chat whose text holds a trigger is answered with its reply, token by token, then
the end token (the trigger that comes last wins, so each turn of a conversation can have its own).
A raw prompt gets the same if it ends with a marker: :data:`~models.tokenizer.ASSISTANT_HEADER` or
``<|endoftext|>``. Without a marker, and where no trigger fits, the default reply speaks; without a
marker it is repeated without end.

The model runs in any engine that uses mlx-lm's caches, batched or not, and needs
``trust_remote_code``: its code is its ``model_file``. It cannot be run with a quantized or
a rotating cache, which forget what was said.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from support.models import tokenizer as tokenizers

FaultAction = Literal[
    "wait",
    "raise",
    "raise_masked",
    "abort",
    "segfault",
    "kill",
    "sigstop",
    "exit",
    "spin_gil_released",
    "spin_gil_held",
    "leak",
    "nan",
    "constant",
]

CODE = Path(__file__).with_name("scripted_model.py")
DEFAULT_REPLY = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True)
class ModelFault:
    """A fault in the forward pass that computes output token ``at`` (0 is the first), in one that
    prefills several tokens of a prompt with the trigger already in it (``"prefill"``), or while the
    model loads (``"load"``, for ``build(load_faults=...)``).

    ``message`` is the exception's text (``raise``), the last lines on stderr (``abort``), the code
    (``exit``), or the name of a ``wait``: it writes its pid into a file ``<name>.waits`` and goes
    on when there is one called ``<name>.go``. Of a ``raise_masked`` the first line is raised, and
    each further one by the cleanup after the one before. A ``leak`` is of so many megabytes.
    ``nan`` and ``constant`` spoil the row's logits. ``times`` bounds the number of faults over all
    processes that load the folder: with 1, the next worker survives. Faults of the same moment
    happen in their order.
    """

    at: int | Literal["prefill", "load"]
    action: FaultAction
    message: str = ""
    times: int | None = None


@dataclass(frozen=True)
class ScriptedReply:
    """A reply, text or token ids, to prompts whose text holds the trigger."""

    trigger: str
    reply: str | Sequence[int]
    faults: Sequence[ModelFault] = field(default_factory=tuple)


def build(
    folder: Path,
    replies: Sequence[ScriptedReply] = (),
    *,
    default: str | Sequence[int] = DEFAULT_REPLY,
    step_s: float = 0.0,
    prefill_token_s: float = 0.0,
    load_faults: Sequence[ModelFault] = (),
    context: int = 4096,
    tokenizer: tokenizers.Kind = "tools",
    padding: int = 0,
    template: str | None = None,
) -> Path:
    """Saves a scripted model into ``folder`` (made if need be) and returns it.

    ``step_s`` is slept in every forward pass, ``prefill_token_s`` for every position of one that
    has several. ``padding`` widens the logits beyond the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizers.save(folder, tokenizer, context=context, template=template)
    width = vocabulary.get_vocab_size() + padding

    def ids(text: str | Sequence[int]) -> list[int]:
        return vocabulary.encode(text).ids if isinstance(text, str) else list(text)

    def named(fault: ModelFault, name: str) -> dict[str, Any]:
        return {"name": name, **asdict(fault)}

    header = ids(tokenizers.ASSISTANT_HEADER)
    script = {
        "step_s": step_s,
        "prefill_token_s": prefill_token_s,
        "markers": [header, header + ids(tokenizers.EMPTY_THOUGHT), ids(tokenizers.PAD)],
        "default": ids(default),
        "load_faults": [named(fault, f"load-{n}") for n, fault in enumerate(load_faults)],
        "replies": [
            {
                "trigger": scripted.trigger,
                "reply": ids(scripted.reply),
                "faults": [named(f, f"reply-{p}-{n}") for n, f in enumerate(scripted.faults)],
            }
            for p, scripted in enumerate(replies)
        ],
    }
    config = {
        # Transformers warns about a type that it does not know; mlx-lm looks at model_file first.
        "model_type": "llama",
        "model_file": "model.py",
        "vocab_size": width,
        "max_position_embeddings": context,
        "eos_token_id": vocabulary.token_to_id(tokenizers.END),
        "num_hidden_layers": 1,
        "hidden_size": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 1,
    }
    noise = np.random.default_rng(0).permutation(width).astype(np.float32) / width
    mx.save_safetensors(
        str(folder / "model.safetensors"), {"noise": mx.array(noise)}, {"format": "mlx"}
    )
    shutil.copyfile(CODE, folder / "model.py")
    (folder / "script.json").write_text(json.dumps(script, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
