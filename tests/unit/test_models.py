"""The tests' own models, seen through mlx-lm as any engine would use them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from support.models import scripted, tiny
from support.models import tokenizer as tokenizers
from support.models.scripted import ModelFault, ScriptedReply

Loaded = tuple[Any, Any]
SOME_TEXT = "The quick brown fox jumps over the lazy dog, and then it does so again. "


def solo(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, **options)
    return [int(token) for token, _ in steps]


def batched(model: Any, prompts: Sequence[Sequence[int]], tokens: int, **options: Any) -> list[Any]:
    generator = BatchGenerator(model, max_tokens=tokens, **options)
    uids = generator.insert([list(prompt) for prompt in prompts])
    out: dict[int, list[int]] = {uid: [] for uid in uids}
    finished: set[int] = set()
    while len(finished) < len(uids):
        for response in generator.next_generated():
            out[response.uid].append(response.token)
            if response.finish_reason:
                finished.add(response.uid)
    generator.close()
    return [out[uid] for uid in uids]


def chat(tokenizer: Any, text: str, **options: Any) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    return ids


# The tokenizer


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return tokenizers.train("plain")


@given(text=st.text())
def test_any_text_survives_the_tokenizer(plain: Tokenizer, text: str) -> None:
    ids = plain.encode(text).ids
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert max(ids, default=0) < plain.get_vocab_size()


def test_every_byte_is_a_token(plain: Tokenizer) -> None:
    vocabulary = plain.get_vocab()
    assert sorted(i for token, i in vocabulary.items() if len(token) == 1) == list(range(3, 259))


@pytest.mark.process
def test_training_gives_the_same_tokenizer_in_every_process() -> None:
    script = "from support.models.tokenizer import train; print(train('thinking').to_str(), end='')"
    tests = Path(__file__).parents[1]
    other = subprocess.run(
        [sys.executable, "-c", script], cwd=tests, capture_output=True, text=True
    )
    assert other.stdout == tokenizers.train("thinking").to_str()


@pytest.mark.parametrize(
    ("kind", "tools", "thinking"),
    [("plain", False, False), ("tools", True, False), ("thinking", True, True)],
)
def test_mlx_lm_infers_what_a_tokenizer_can(
    tmp_path: Path, kind: tokenizers.Kind, tools: bool, thinking: bool
) -> None:
    tokenizers.save(tmp_path, kind, context=512)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_tool_calling is tools
    assert tokenizer.has_thinking is thinking
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    if tools:
        assert tokenizer.tool_parser('\n{"name": "f", "arguments": {}}\n')["name"] == "f"
        assert len(tokenizer.tool_call_start_tokens) == 1


def test_the_template_shows_tools_and_their_use(tools_model: Path) -> None:
    tokenizer = load_tokenizer(tools_model)
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 7, "y": "é"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "11"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "<tools>\n" + json.dumps(tool) + "\n</tools>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"x": 7, "y": "é"}}\n</tool_call>' in text
    assert "<tool_response>\n11\n</tool_response>" in text
    assert text.count("Be brief.") == 1

    call["function"] = {"name": "add", "arguments": '{"x": 7}'}
    with pytest.raises(TypeError, match="mapping"):
        tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    with pytest.raises(TemplateError, match="Unknown role: developer"):
        tokenizer.apply_chat_template([{"role": "developer", "content": "x"}], tokenize=False)


def test_a_thinking_template_closes_the_thought_when_asked(thinking_model: Path) -> None:
    tokenizer = load_tokenizer(thinking_model)
    header = tokenizers.ASSISTANT_HEADER
    assert tokenizer.decode(chat(tokenizer, "Hi")).endswith(header)
    quiet = tokenizer.decode(chat(tokenizer, "Hi", enable_thinking=False))
    assert quiet.endswith(header + tokenizers.EMPTY_THOUGHT)


# Random weights


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_random_weights_write_varied_text(tmp_path: Path, architecture: str) -> None:
    tiny.build(tmp_path / "model", architecture=architecture, padding=60)
    model, tokenizer = load(str(tmp_path / "model"))
    ids = solo(model, tokenizer.encode(SOME_TEXT * 3), 48)
    assert len(set(ids)) > 24
    assert max(ids) < len(tokenizer)
    assert not set(ids) & {0, 1, 2}
    assert model(mx.array([[5, 6]])).shape == (1, 2, len(tokenizer) + 60)


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    folders = [tiny.build(tmp_path / str(n), seed=seed) for n, seed in enumerate([3, 3, 4])]
    first, same, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == same
    assert first != other


def test_a_batch_says_what_each_row_says_alone(tiny_model: Path) -> None:
    model, tokenizer = load(str(tiny_model))
    prompts = [
        tokenizer.encode(text) for text in (SOME_TEXT, "Hello", "x = 1\ny = ", SOME_TEXT * 4)
    ]
    alone = [solo(model, prompt, 24) for prompt in prompts]
    assert batched(model, prompts, 24, prefill_batch_size=4, prefill_step_size=16) == alone
    assert len({tuple(ids) for ids in alone}) == len(alone)


def test_a_prompt_outgrows_the_window_of_local_layers(tmp_path: Path) -> None:
    model, tokenizer = load(str(tiny.build(tmp_path, architecture="gemma3_text")))
    prompt = tokenizer.encode(SOME_TEXT * 4)
    local, whole = cache = make_prompt_cache(model)
    solo(model, prompt, 8, prompt_cache=cache)
    assert local.size() == tiny.SLIDING_WINDOW < len(prompt)
    assert whole.size() == len(prompt) + 8


# Scripts

REPLIES = [
    ScriptedReply("[sun]", "Sunny, 21 °C ☀️."),
    ScriptedReply("[count]", "one two three four five six"),
]


@pytest.fixture(scope="module")
def script(scripted_model: Callable[..., Path]) -> Loaded:
    return load(str(scripted_model(REPLIES, padding=13)), trust_remote_code=True)


def replies(tokenizer: Any, *texts: str) -> list[list[int]]:
    return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]


def test_a_script_answers_a_trigger_and_ends(script: Loaded) -> None:
    model, tokenizer = script
    (sun, count, default) = replies(
        tokenizer, REPLIES[0].reply, REPLIES[1].reply, scripted.DEFAULT_REPLY
    )
    assert solo(model, chat(tokenizer, "So, [sun]?"), len(sun)) == sun
    assert solo(model, chat(tokenizer, "[count] please"), len(count)) == count
    assert solo(model, chat(tokenizer, "Hello"), len(default)) == default
    assert solo(model, tokenizer.encode("Raw [sun]<|endoftext|>"), len(sun)) == sun


def test_a_script_without_a_marker_never_ends(script: Loaded) -> None:
    model, tokenizer = script
    said = tokenizer.decode(solo(model, tokenizer.encode("Once upon a"), 100))
    assert scripted.DEFAULT_REPLY * 2 in said
    assert "<|im_end|>" not in said


def test_the_last_trigger_of_a_conversation_counts(script: Loaded) -> None:
    model, tokenizer = script
    (count,) = replies(tokenizer, REPLIES[1].reply)
    messages = [
        {"role": "user", "content": "[sun]"},
        {"role": "assistant", "content": REPLIES[0].reply},
        {"role": "user", "content": "[count]"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert solo(model, prompt, len(count)) == count


@settings(max_examples=20, deadline=None)
@given(
    fillers=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    step=st.integers(1, 24),
    cut=st.integers(0, 5),
)
def test_a_script_survives_batches_chunks_and_resuming(
    script: Loaded, fillers: list[int], step: int, cut: int
) -> None:
    model, tokenizer = script
    texts = [(" fox" * n + REPLIES[n % 2].trigger, REPLIES[n % 2].reply) for n in fillers]
    expected = [replies(tokenizer, str(reply))[0] for _, reply in texts]
    prompts = [
        [*chat(tokenizer, text), *said[:cut]]
        for (text, _), said in zip(texts, expected, strict=True)
    ]
    said = batched(
        model, prompts, 12, prefill_step_size=step, stop_tokens=[[tokenizer.eos_token_id]]
    )
    assert said == [ids[cut : cut + 12] for ids in expected]


def test_a_script_follows_a_trimmed_cache(script: Loaded) -> None:
    model, tokenizer = script
    (sun,) = replies(tokenizer, REPLIES[0].reply)
    prompt = chat(tokenizer, "[sun]")
    cache = make_prompt_cache(model)
    solo(model, prompt, 4, prompt_cache=cache)
    trim_prompt_cache(cache, cache[0].offset - len(prompt) + 1)
    assert solo(model, prompt[-1:], len(sun), prompt_cache=cache) == sun


def test_logits_do_not_depend_on_chunks(script: Loaded) -> None:
    model, tokenizer = script
    ids = mx.array([chat(tokenizer, "[count] " * 5)])
    whole = np.array(model(ids, cache=make_prompt_cache(model)))
    cache = make_prompt_cache(model)
    chunks = [np.array(model(chunk, cache=cache)) for chunk in mx.split(ids, [3, 4, 20], axis=1)]
    assert np.array_equal(np.concatenate(chunks, axis=1), whole)
    assert whole.shape[-1] == len(tokenizer) + 13
    assert len(np.unique(whole[0, -1])) == whole.shape[-1]


# Faults


def faulty(scripted_model: Callable[..., Path], fault: ModelFault) -> Path:
    return scripted_model(
        [ScriptedReply("[boom]", "one two three", faults=[fault]), ScriptedReply("[ok]", "fine")]
    )


def test_a_fault_strikes_at_its_token_and_nobody_else(scripted_model: Callable[..., Path]) -> None:
    folder = faulty(scripted_model, ModelFault(at=2, action="raise", message="[METAL] first"))
    model, tokenizer = load(str(folder), trust_remote_code=True)
    prompt = chat(tokenizer, "[boom]")
    (reply,) = replies(tokenizer, "one two three")
    assert solo(model, chat(tokenizer, "[ok]"), 1) == replies(tokenizer, "fine")[0][:1]
    cache = make_prompt_cache(model)
    assert int(model(mx.array([prompt]), cache=cache)[0, -1].argmax()) == reply[0]
    assert int(model(mx.array([reply[:1]]), cache=cache)[0, -1].argmax()) == reply[1]
    with pytest.raises(RuntimeError, match=r"\[METAL\] first"):
        model(mx.array([reply[1:2]]), cache=cache)


def test_a_fault_in_prefill_needs_its_trigger(scripted_model: Callable[..., Path]) -> None:
    folder = faulty(scripted_model, ModelFault(at="prefill", action="raise", message="no"))
    model, tokenizer = load(str(folder), trust_remote_code=True)
    model(mx.array([chat(tokenizer, "[ok]")]))
    with pytest.raises(RuntimeError, match="no"):
        model(mx.array([chat(tokenizer, "[boom]")]))


def test_a_bounded_fault_is_over_for_the_next_process(scripted_model: Callable[..., Path]) -> None:
    folder = scripted_model(load_faults=[ModelFault("load", "raise", "not yet", times=2)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not yet"):
            load(str(folder), trust_remote_code=True)
    load(str(folder), trust_remote_code=True)


@pytest.mark.parametrize("action", ["nan", "constant"])
def test_spoilt_logits_are_one_rows_alone(
    scripted_model: Callable[..., Path], action: scripted.FaultAction
) -> None:
    model, tokenizer = load(
        str(faulty(scripted_model, ModelFault(at=0, action=action))), trust_remote_code=True
    )
    prompts = [chat(tokenizer, text) for text in ("[ok]", "[boom]")]
    generator = BatchGenerator(model, max_tokens=2)
    generator.insert(prompts)
    good, bad = (np.array(response.logprobs) for response in generator.next_generated())
    generator.close()
    assert np.isfinite(good).all()
    assert np.ptp(good) > 0
    assert np.isnan(bad).all() if action == "nan" else np.ptp(bad) == 0
