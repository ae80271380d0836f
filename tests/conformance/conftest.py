"""Servers that the tests of this folder share. Each starts once, with the first test that uses
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mayfly_server.http.api_keys import from_environment
from support.doubles.fake_node import FakeNode
from support.models import scripted
from support.models.tokenizer import START
from support.raw_http import ADMIN, LIMITS, SECRET
from support.running_front import RunningFront
from support.scripted_answers import scripted_replies
from support.server import Server, serving

SLOW_STEP_S = 0.05
SLOW_PREFILL_TOKEN_S = 0.004

FUSSY_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FUSSY_CONTEXT = 128


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="package")
def tiny(tools_model: Path, folder: Callable[[], Path]) -> Iterator[Server]:
    """A server of a random-weight model that knows tools and never ends an answer by itself."""
    with serving(tools_model, folder()) as server:
        yield server


@pytest.fixture(scope="package")
def script(folder: Callable[[], Path]) -> Iterator[Server]:
    """A server of a model with tools and thoughts that gives the replies of
    :mod:`support.scripted_answers`."""
    model = scripted.build(folder() / "script", scripted_replies(), tokenizer="thinking")
    with serving(model, folder(), "--trust-remote-code") as server:
        yield server


@pytest.fixture(scope="package")
def slow(folder: Callable[[], Path]) -> Iterator[Server]:
    """A server of the scripted model at 20 tokens a second, and 250 prompt tokens a second."""
    model = scripted.build(
        folder() / "slow",
        scripted_replies(),
        tokenizer="thinking",
        step_s=SLOW_STEP_S,
        prefill_token_s=SLOW_PREFILL_TOKEN_S,
    )
    with serving(model, folder(), "--trust-remote-code") as server:
        yield server


@pytest.fixture(scope="package")
def fussy(folder: Callable[[], Path]) -> Iterator[Server]:
    """A server of the scripted model with a small context, a template that refuses many
    conversations, and a tokenizer that begins raw prompts with a token of its own."""
    model = scripted.build(
        folder() / "fussy", scripted_replies(), context=FUSSY_CONTEXT, template=FUSSY_TEMPLATE
    )
    path = str(model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    tokenizer.save(path)
    with serving(model, folder(), "--trust-remote-code") as server:
        yield server


@pytest.fixture(scope="module")
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker()
        yield node


@pytest.fixture(scope="module")
def front(node: FakeNode) -> Iterator[RunningFront]:
    """A front end on the loopback interface, without keys, with fake workers."""
    with RunningFront(node.control) as front:
        yield front


@pytest.fixture(scope="module")
def hurried(node: FakeNode) -> Iterator[RunningFront]:
    """A front end with short time limits for slow clients."""
    with RunningFront(node.control, connections=LIMITS) as front:
        yield front


@pytest.fixture(scope="module")
def locked(node: FakeNode) -> Iterator[RunningFront]:
    keys = from_environment({"MAYFLY_API_KEYS": SECRET, "MAYFLY_ADMIN_KEY": ADMIN})
    with RunningFront(node.control, keys=keys) as front:
        yield front
