"""Builds a model that says what a test tells it to, and fails when the test tells it to.

::

    build(folder, [
        ScriptedReply("weather?", 'Sunny.'),
        ScriptedReply("[boom]", "one two three", faults=[ModelFault(at=2, action="abort")]),
    ])

A chat whose text contains a trigger is answered with the trigger's reply, token by token, and then
the end token. If the chat contains several triggers, the last one wins, so each turn of a
conversation can have its own. A raw prompt is answered in the same way if it ends with a marker,
:data:`~models.tokenizer.ASSISTANT_HEADER` or ``<|endoftext|>``. A prompt without any trigger gets
the default reply; a prompt without a marker gets the default reply repeated without end.

The model runs in any engine that uses mlx-lm's caches, batched or not, and needs
``trust_remote_code``, because its code is its ``model_file``. Quantized and rotating caches do not
work: the model reads the token ids back from the cache, and these caches lose them.
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
    """A fault of the scripted model: in the forward pass that computes output token ``at`` (0 is
    the first), in a prefill of several tokens of a prompt that contains the trigger
    (``"prefill"``), or while the model loads (``"load"``, for ``build(load_faults=...)``).

    The use of ``message`` depends on ``action``. ``raise``: the exception's text. ``abort``: the
    last lines on stderr. ``exit``: the exit status. ``leak``: the megabytes to leak. ``wait``: the
    wait's name; the model writes its process id into a file ``<name>.waits``, and goes on when a
    file ``<name>.go`` exists. ``raise_masked``: the texts, one a line, of exceptions that are
    raised one after the other, each while the one before is handled. The actions ``nan`` and
    ``constant`` make the sequence's logits NaN or equal.

    ``times`` limits how often the fault happens over all processes that load the folder: with 1,
    the next worker survives. Faults of the same moment happen in their order.
    """

    at: int | Literal["prefill", "load"]
    action: FaultAction
    message: str = ""
    times: int | None = None


@dataclass(frozen=True)
class ScriptedReply:
    """A scripted model's reply, as text or token ids, to prompts whose text contains the
    trigger."""

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
    """Saves a scripted model into ``folder`` (made if need be) and returns the folder.

    Every forward pass sleeps ``step_s`` seconds, and one with several tokens (a prefill)
    ``prefill_token_s`` more for each token. ``padding`` is the number of logits beyond the
    vocabulary. ``template`` replaces the tokenizer's chat template.
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
        # Transformers warns about unknown model types; mlx-lm looks at model_file first.
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
