"""lm-evaluation-harness, as released: its scores are those of a forward pass of the model here."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load

from support import agents
from support.server import Server, serving

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]

PACKAGES = ("lm-eval[api]==0.4.13", "transformers")
QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " Rome and others"]),
    ("Water freezes at a temperature of zero degrees", [" Celsius", " Monday"]),
    ("The sun rises in the", [" east", " kitchen"]),
]
TEXT = "Once upon a time there was a small server that never lost a request."
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
"""
TASKS = {
    "own_choices": """
task: own_choices
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "own_text": """
task: own_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "own_answers": """
task: own_answers
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of the installed release."""
    folder = tmp_path_factory.mktemp("lm-eval")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES]
    subprocess.run(pip, check=True)
    return folder / "bin" / "lm_eval"


@pytest.fixture
def server(harness: Path, demo_model: Path, tmp_path: Path) -> Iterator[Server]:
    """The demo model, with no network but the loopback interface."""
    with agents.loopback_alone(), serving(demo_model, tmp_path) as server:
        yield server


def samples(harness: Path, server: Server, folder: Path) -> dict[str, list[dict[str, Any]]]:
    data = folder / "data.jsonl"
    documents = [{"query": q, "choices": c, "text": TEXT} for q, c in QUESTIONS]
    data.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task + COMMON.format(data=data))
    arguments = f"model={server.model},base_url={server.url}/v1/completions"
    command = [harness, "--model", "local-completions", "--tasks", ",".join(TASKS)]
    command += ["--model_args", f"{arguments},tokenizer={server.folder}", "--batch_size", "2"]
    command += ["--include_path", folder, "--log_samples", "--output_path", folder / "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    run = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = {}
    for name in TASKS:
        [file] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def test_lm_evals_scores_are_the_models(harness: Path, server: Server, tmp_path: Path) -> None:
    found = samples(harness, server, tmp_path)
    model, tokenizer = load(str(server.folder))

    def score(context: list[int], text: list[int]) -> tuple[float, bool]:
        ids = [*context, *text]
        logprobs = nn.log_softmax(model(mx.array([ids]))[0].astype(mx.float32))[len(context) - 1 :]
        own = [logprobs[at, id].item() for at, id in enumerate(text)]
        best = logprobs.argmax(axis=-1).tolist()
        return sum(own), best[: len(text)] == text

    for sample in found["own_choices"]:
        context = tokenizer.encode(sample["doc"]["query"])
        for text, [response] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = tokenizer.encode(sample["doc"]["query"] + text)
            logprob, greedy = score(context, whole[len(context) :])
            assert float(response[0]) == pytest.approx(logprob, abs=1e-4)
            assert str(response[1]) == str(greedy)
    for sample in found["own_text"]:
        logprob, _ = score([tokenizer.bos_token_id], tokenizer.encode(TEXT))
        assert float(sample["resps"][0][0]) == pytest.approx(logprob, abs=1e-4)
    for sample in found["own_answers"]:
        ids = tokenizer.encode(sample["doc"]["query"])
        for _ in range(8):
            ids.append(int(model(mx.array([ids]))[0, -1].argmax().item()))
        prompt = len(tokenizer.encode(sample["doc"]["query"]))
        assert sample["resps"][0][0] == tokenizer.decode(ids[prompt:]).partition("\n")[0]
