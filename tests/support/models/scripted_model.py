"""The code of a scripted model, which says what a test tells it to; lies in the model's folder as
its ``model_file``.

The code imports only packages that a worker has, since it runs in a worker. Its replies and faults
are read from ``script.json`` in the model's folder, which :mod:`models.scripted` writes.

The next token follows from the token ids so far, the history. The cache's keys *are* the token ids,
so an error of the engine with the cache (batching, padding, chunks, trimming, resuming) shows at
once in the text::

    history:  <|im_start|> user ... trigger ... <|im_start|>assistant \\n  r0 r1 r2
              '------------------- prompt --------------------------'  '-- n=3 --'
    next:     the reply of that trigger: reply[3], or the end token after its last

Without a marker (the assistant's header or the end of text) in the history, the model repeats the
default reply: token ``reply[len(history) % len(reply)]``.
"""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent
WAIT_S = 60.0
LOGIT = 20.0
"""The logit of the token that the script demands; all other logits lie within (0, 1)."""


@dataclass
class ModelArgs(BaseModelArgs):
    vocab_size: int
    eos_token_id: int
    num_hidden_layers: int = 1


@dataclass
class Fault:
    """A scripted model's fault at "load", at "prefill", or after ``at`` tokens of the reply. It
    happens ``times`` times over all processes that load the model's folder (None: always)."""

    name: str
    at: str | int
    action: str
    message: str = ""
    times: int | None = None

    def claim(self) -> bool:
        """Returns True if the fault has happened less than ``times`` times, and counts it. Claims
        are files, because the fault may kill the process."""
        if self.times is None:
            return True
        for n in range(self.times):
            try:
                (FOLDER / f"{self.name}.{n}.struck").open("x").close()
            except FileExistsError:
                continue
            return True
        return False


@dataclass
class ScriptedReply:
    trigger: str
    reply: list[int]
    faults: list[Fault] = field(default_factory=list)


def _spin_holding_the_gil() -> None:
    libc = ctypes.PyDLL(None)  # a PyDLL keeps the GIL through its calls
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # never returns, signals or not


def _spin_releasing_the_gil() -> None:
    while True:
        time.sleep(3600)


def _abort(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os.abort()


def _raise(message: str) -> None:
    raise RuntimeError(message)


def _raise_masked(message: str) -> None:
    """Raises RuntimeError with the last line of ``message``, with the lines before it as the texts
    of the exceptions in its context."""
    before, newline, last = message.rpartition("\n")
    try:
        if newline:
            _raise_masked(before)
    finally:
        raise RuntimeError(last)


def _wait(name: str) -> None:
    """Writes the process's id into the file ``<name>.waits`` in the model's folder, and waits for
    the file ``<name>.go``, 60 s at most."""
    waiting = FOLDER / f"{name}.waits.tmp"
    waiting.write_text(str(os.getpid()))
    waiting.rename(FOLDER / f"{name}.waits")
    deadline = time.monotonic() + WAIT_S
    while not (FOLDER / f"{name}.go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)


LEAKED: list[bytes] = []
ACTIONS = {
    "wait": _wait,
    "raise": _raise,
    "raise_masked": _raise_masked,
    "abort": _abort,
    "segfault": lambda _: ctypes.string_at(0),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda code: os._exit(int(code or 0)),
    "spin_gil_released": lambda _: _spin_releasing_the_gil(),
    "spin_gil_held": lambda _: _spin_holding_the_gil(),
    "leak": lambda megabytes: LEAKED.append(b"." * (int(megabytes) << 20)),
}
LOGITS = {"nan": np.nan, "constant": 1.0}
"""Actions of faults that only spoil the sequence's logits, with the value of all its logits."""


class Script:
    def __init__(self) -> None:
        whole = json.loads((FOLDER / "script.json").read_text())
        self.step_s: float = whole["step_s"]
        self.prefill_token_s: float = whole["prefill_token_s"]
        self.load_faults = [Fault(**fault) for fault in whole["load_faults"]]
        self.markers = [np.array(marker) for marker in whole["markers"]]
        self.replies = [
            ScriptedReply(
                scripted["trigger"],
                scripted["reply"],
                [Fault(**fault) for fault in scripted["faults"]],
            )
            for scripted in whole["replies"]
        ]
        self.default = ScriptedReply("", whole["default"])
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._known: dict[bytes, ScriptedReply] = {}

    def reply_for(self, prompt: np.ndarray) -> ScriptedReply:
        """Returns the reply whose trigger comes last in the prompt's text; the default reply if the
        text contains no trigger."""
        key = prompt.tobytes()
        if key not in self._known:
            text = self.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            last, scripted = max(
                ((text.rfind(scripted.trigger), scripted) for scripted in self.replies),
                key=lambda found: found[0],
                default=(-1, self.default),
            )
            self._known[key] = scripted if last >= 0 else self.default
        return self._known[key]

    def prompt_lengths(self, history: np.ndarray) -> np.ndarray:
        """Returns, for each position of the history, the length of the prompt in tokens: the end of
        the last marker up to the position, 0 without a marker. Shape [L]."""
        ends = np.zeros(len(history), dtype=np.int64)
        for marker in self.markers:
            if len(history) >= len(marker):
                found = (sliding_window_view(history, len(marker)) == marker).all(axis=1)
                ends[np.flatnonzero(found) + len(marker) - 1] = 1
        return np.maximum.accumulate(ends * np.arange(1, len(history) + 1))


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = "scripted"
        self.noise = mx.zeros((args.vocab_size,))
        self._script = Script()
        for fault in self._script.load_faults:
            if fault.claim():
                ACTIONS[fault.action](fault.message)

    @property
    def layers(self) -> list[None]:
        return [None]

    def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
        """The scripted model's forward pass: token ids [B, L] to logits [B, L, V]. Runs the faults
        that are due."""
        rows = self._histories(inputs, cache[0] if cache else None)
        length = inputs.shape[1]
        time.sleep(self._script.step_s + length * self._script.prefill_token_s * (length > 1))
        said = [self._next_ids(history, length) for history in rows]
        logits = mx.broadcast_to(self.noise, (*inputs.shape, self.args.vocab_size))
        logits = mx.put_along_axis(
            logits, mx.array(np.stack(said))[..., None], mx.array(LOGIT), axis=-1
        )
        for row, history in enumerate(rows):
            for action in self._run_faults(history, length):
                logits[row] = LOGITS[action]
        return logits

    def _histories(self, inputs: mx.array, cache: object) -> list[np.ndarray]:
        """Returns the token ids of every sequence, from the cache and ``inputs``, without the
        padding on the left."""
        keys = inputs[:, None, :, None].astype(mx.float32)
        if cache is None:
            return list(np.array(inputs))
        kept, _ = cache.update_and_fetch(keys, keys)
        ids = np.array(kept[:, 0, :, 0]).astype(np.int64)
        if not hasattr(cache, "left_padding"):
            return list(ids)
        return [row[start:] for row, start in zip(ids, cache.left_padding.tolist(), strict=True)]

    def _next_ids(self, history: np.ndarray, length: int) -> np.ndarray:
        """Returns the token that the script demands after each of the last ``length`` positions of
        a sequence."""
        prompts = self._script.prompt_lengths(history)[-length:]
        seen = np.arange(len(history) - length + 1, len(history) + 1)
        babble = np.array(self._script.default.reply)
        ids = babble[seen % len(babble)]
        for prompt in np.unique(prompts[prompts > 0]):
            here = prompts == prompt
            lines = [*self._script.reply_for(history[:prompt]).reply, self.args.eos_token_id]
            ids[here] = np.array(lines)[np.minimum(seen[here] - prompt, len(lines) - 1)]
        return ids

    def _run_faults(self, history: np.ndarray, length: int) -> list[str]:
        """Runs the faults that are due in a sequence's forward pass over ``length`` tokens; returns
        the actions that only spoil the sequence's logits."""
        if length > 1:
            scripted, at = self._script.reply_for(history), "prefill"
        else:
            prompt = int(self._script.prompt_lengths(history)[-1])
            scripted, at = self._script.reply_for(history[:prompt]), len(history) - prompt
        due = [fault for fault in scripted.faults if fault.at == at and fault.claim()]
        for fault in due:
            if fault.action in ACTIONS:
                ACTIONS[fault.action](fault.message)
        return [fault.action for fault in due if fault.action in LOGITS]
