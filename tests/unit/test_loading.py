"""Loading a model folder: requirements, refusals, and changes that make it another model."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from structlog.testing import capture_logs

from mayfly_protocol.capabilities import in_words
from mayfly_protocol.faults import classify_exception
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.fetch.model_folder import check
from mayfly_worker.fetch.reporting import FetchError
from mayfly_worker.model.capabilities import context_of
from mayfly_worker.model.loading import digest, load
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.model.weight_files import INDEX, ModelLoadError, tensor_names, weight_files
from support.models import tiny
from support.models.scripted import ScriptedReply

ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def settings(folder: Path, **options: Any) -> WorkerSettings:
    return WorkerSettings("s", 1, "", "", str(folder), "model", **options)


def quiet(*_: object) -> None:
    pass


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights, as mlx-lm saves them."""
    folder = tmp_path_factory.mktemp("adapter")
    parameters = {"rank": 4, "dropout": 0.0, "scale": 10.0}
    model, _ = load_model(tiny_model)
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(3)
    weights = {
        name: mx.random.normal(p.shape)
        for name, p in tree_flatten(model.parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    }
    assert weights
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def logits(model: Any) -> mx.array:
    out: mx.array = model(mx.array([[5, 6, 7]]))
    return out


def test_progress_is_told_in_bytes(tiny_model: Path) -> None:
    told: list[tuple[str, int, int]] = []
    loaded = load(settings(tiny_model), lambda *what: told.append(what))
    for phase in ("warming", "loading"):
        steps = [(done, total) for p, done, total in told if p == phase and total]
        assert [d for d, _ in steps] == sorted(d for d, _ in steps)
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1] > 0
    assert loaded.card.weight_bytes == sum(
        p.nbytes for _, p in tree_flatten(loaded.model.parameters())
    )


def test_a_file_that_cannot_be_read_is_what_loading_fails_of(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.unlink()
    weights.symlink_to(copied / "gone")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(settings(copied), quiet)


def test_files_may_be_read_long_before_anybody_looks(tiny_model: Path) -> None:
    files = weight_files(tiny_model)
    warming = WeightReader(files)
    size = sum(file.stat().st_size for file in files)
    for _ in range(2):
        told: list[tuple[int, int]] = []
        warming.follow(lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        assert told[0] == (0, size)
        assert told[-1] == (size, size)


def test_what_was_found_out_about_padding_is_kept(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    asked: list[Any] = []

    def prefills(because: str) -> None:
        monkeypatch.setattr(
            "mayfly_worker.model.probe._Batches.prefill", lambda _: asked.append(because) or because
        )

    def padding_safe() -> bool:
        return load(settings(copied, canary_dir=str(kept)), quiet).probe.padding_safe

    prefills("no")
    assert not padding_safe()
    assert len(list(kept.iterdir())) == 1, "the device may not have been well"
    prefills("")
    assert [padding_safe(), padding_safe()] == [True, True]
    assert asked == ["no", ""]
    _with_text("tokenizer_config.json", "{}")(copied)
    prefills("no")
    assert not padding_safe(), "it is another model"


def test_an_adapter_changes_the_answer_and_the_digest(tiny_model: Path, adapter: Path) -> None:
    plain = load(settings(tiny_model), quiet)
    tuned = load(settings(tiny_model, adapter=str(adapter)), quiet)
    assert not mx.allclose(logits(plain.model), logits(tuned.model))
    assert plain.card.digest != tuned.card.digest


def test_an_adapter_of_another_model_is_refused(copied: Path, adapter: Path) -> None:
    wrong = copied.parent / "wrong"
    shutil.copytree(adapter, wrong)
    weights = {"model.layers.0.self_attn.q_proj.lora_a": mx.zeros((3, 4))}
    mx.save_safetensors(str(wrong / "adapters.safetensors"), weights)
    with pytest.raises(ModelLoadError, match="incompatible"):
        load(settings(copied, adapter=str(wrong)), quiet)
    with pytest.raises(ModelLoadError, match="adapter"):
        load(settings(copied, adapter=str(copied.parent / "nowhere")), quiet)


def _without(name: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / name).unlink()

    return work


def _with_text(name: str, text: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / name).write_text(text)

    return work


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_without("config.json"), "config.json is missing"),
        (_with_text("config.json", "{"), "config.json is not valid JSON"),
        (_with_text("config.json", '{"model_type": "nonsense"}'), "nonsense"),
        (_without("model.safetensors"), "no weights"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    copied: Path, spoil: Callable[[Path], None], says: str
) -> None:
    spoil(copied)
    with pytest.raises(ModelLoadError, match=says):
        load(settings(copied), quiet)


@pytest.mark.parametrize(
    ("exits", "says"),
    [
        ("print('First: pip install ai2-olmo'); sys.exit(1)", "First: pip install ai2-olmo"),
        ("sys.exit('hf_olmo is missing')", "hf_olmo is missing"),
        ("sys.exit(3)", "its code ended the program: Hello"),
    ],
)
def test_M08_an_import_that_ends_the_program_is_an_error_with_its_words(
    copied: Path, exits: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_file": "code.py"}))
    (copied / "code.py").write_text(f"import sys\nprint('Hello.')\n{exits}\n")
    with pytest.raises(ModelLoadError, match=says):
        load(settings(copied, trust_remote_code=True), quiet)
    assert capsys.readouterr().out.startswith("Hello.")


@pytest.mark.skipif(find_spec("hf_olmo") is not None, reason="the package is installed")
def test_M08_olmo_names_the_package_that_it_needs(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))
    with pytest.raises(ModelLoadError, match="pip install ai2-olmo"):
        load(settings(copied), quiet)


def indexed(folder: Path, *files: str) -> dict[str, mx.array]:
    """Splits a folder's weights into files, with an index that names them; returns the weights."""
    whole = folder / "model.safetensors"
    weights: dict[str, mx.array] = dict(mx.load(str(whole)))  # type: ignore[arg-type]
    mx.eval(weights)
    whole.unlink()
    holders = {name: files[i % len(files)] for i, name in enumerate(weights)}
    for file in files:
        mx.save_safetensors(
            str(folder / file), {n: w for n, w in weights.items() if holders[n] == file}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": holders}))
    return weights


@pytest.mark.parametrize(
    "names", [("model-1.safetensors", "model-2.safetensors"), ("model.safetensors",)]
)
def test_N14_only_the_files_that_the_index_names_are_read(
    tiny_model: Path, copied: Path, names: tuple[str, ...]
) -> None:
    weights = indexed(copied, *names)
    stray = copied / "model-00001-of-00004.safetensors"
    mx.save_safetensors(str(stray), {name: w + 1 for name, w in weights.items()})
    check(copied)
    loaded = load(settings(copied), quiet)
    assert mx.array_equal(logits(loaded.model), logits(load(settings(tiny_model), quiet).model))
    stray.write_text("cut short")
    check(copied)
    load(settings(copied), quiet)


def test_N14_without_an_index_no_tensor_is_in_two_files(copied: Path) -> None:
    weights = indexed(copied, "model-1.safetensors", "model-2.safetensors")
    (copied / INDEX).unlink()
    load(settings(copied), quiet)
    name = next(iter(weights))
    mx.save_safetensors(str(copied / "model-0.safetensors"), {name: weights[name] + 1})
    with pytest.raises(ModelLoadError, match=rf"both model-0\.\S+ and model-1\.\S+ .* {name}"):
        load(settings(copied), quiet)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"x": "model-9.safetensors"}}, r"the first is model-9\.safetensors"),
        ({"weight_map": {"x": "../other/model.safetensors"}}, "files of this folder"),
        ({"weight_map": {"x": "consolidated.safetensors"}}, r"names no file model\*"),
        ({"weight_map": {}}, "weight_map"),
        ([], "weight_map"),
        (None, "not valid JSON"),
    ],
)
def test_N14_an_index_that_names_what_is_missing_is_refused(
    copied: Path, index: Any, says: str
) -> None:
    (copied / INDEX).write_text("{" if index is None else json.dumps(index))
    with pytest.raises(ModelLoadError, match=says):
        load(settings(copied), quiet)
    with pytest.raises(FetchError, match=says):
        check(copied)


def test_S17_a_header_that_claims_gigabytes_is_not_read(copied: Path) -> None:
    whole = copied / "model.safetensors"
    with whole.open("r+b") as file:
        file.write(struct.pack("<Q", 3 << 30))
        file.truncate(4 << 30)  # without a byte on the disk
    tracemalloc.start()
    try:
        assert tensor_names(whole) == []
        with pytest.raises(RuntimeError, match="Invalid json header length"):
            load(settings(copied), quiet)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 345\n"


def _with_entries(name: str, **entries: Any) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | entries))

    return work


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_with_text("tokenizer.json", LFS), r"tokenizer\.json is a pointer of git-lfs"),
        (_with_text("tokenizer.json", '{"model"'), r"Failed to parse tokenizer\.json"),
        (_with_text("tokenizer.json", "{}"), "KeyError: 'added_tokens'"),
        (_with_text("tokenizer_config.json", '{"a'), r"tokenizer_config\.json is not valid JSON"),
        (_with_text("tokenizer_config.json", "[]"), r"tokenizer_config\.json does not hold"),
        (_with_text("special_tokens_map.json", "["), r"special_tokens_map\.json is not valid"),
        (_with_text("generation_config.json", "[]"), r"generation_config\.json does not hold"),
        (_with_text("config.json", "[]"), r"config\.json does not hold a JSON object"),
        (_with_text("config.json", "{}"), "model_type"),
        (_with_text("config.json", LFS), r"config\.json is a pointer of git-lfs"),
        (_with_entries("config.json", num_attention_heads=0), "ZeroDivisionError"),
        (_with_entries("config.json", rope_scaling="x"), "AttributeError"),
        (_with_entries("config.json", text_config="x"), "text_config in config"),
    ],
)
def test_a_folder_that_can_never_be_loaded_is_not_tried_again(
    copied: Path, spoil: Callable[[Path], None], says: str
) -> None:
    spoil(copied)
    with pytest.raises(ModelLoadError, match=says):
        load(settings(copied), quiet)


def test_a_tokenizer_that_raises_a_bare_exception_is_not_tried_again(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise Exception("data did not match any variant")

    monkeypatch.setattr("mayfly_worker.model.loading.load_tokenizer", raises)
    with pytest.raises(ModelLoadError, match="tokenizer cannot be loaded: data did not match"):
        load(settings(copied), quiet)


def test_a_memory_limit_has_to_hold_the_weights(tiny_model: Path) -> None:
    size = (tiny_model / "model.safetensors").stat().st_size
    with pytest.raises(
        ModelLoadError, match=r"weights of 0\.\d+ GB, and memory_limit is 0\.\d+ GB"
    ):
        load(settings(tiny_model, memory_limit=size), quiet)
    load(settings(tiny_model, memory_limit=2 * size), quiet)


def test_corrupt_weights_are_a_fault_of_the_model(copied: Path) -> None:
    (copied / "model.safetensors").write_text("not at all")
    with pytest.raises(RuntimeError) as caught:
        load(settings(copied), quiet)
    verdict = classify_exception(caught.value)
    assert (verdict.kind, verdict.scope) == ("model_load", "model")


def test_R124_code_that_comes_with_a_model_is_not_run_unasked(
    scripted_model: Callable[..., Path], copied: Path
) -> None:
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        load(settings(scripted_model([ScriptedReply("a", "b")])), quiet)

    marker = copied.parent / "marker"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (copied / "tokenization_own.py").write_text(code)
    path = copied / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", None]}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="a tokenizer that is Python code"):
        load(settings(copied), quiet)
    assert not marker.exists()


def test_N13_the_card_has_the_sampling_that_the_authors_recommend(copied: Path) -> None:
    authors = {"temperature": 0.6, "top_k": 1}
    (copied / "generation_config.json").write_text(json.dumps(authors | {"do_sample": True}))
    used, unused = (
        load(settings(copied, generation_config=choice), quiet).card for choice in ("auto", "none")
    )
    assert used.sampling == authors
    assert unused.sampling == {}
    assert used.digest != unused.digest, "the answers differ, so no worker continues the other's"


def test_F02_the_tool_parser_is_the_templates_or_the_options(tools_model: Path) -> None:
    cards = [
        load(settings(tools_model, tool_parser=name), quiet).card
        for name in ("auto", "mistral", "none")
    ]
    assert [(card.tools, card.tool_parser) for card in cards] == [
        (True, "json_tools"),
        (True, "mistral"),
        (False, ""),
    ]
    assert {card.template_tools for card in cards} == {True}
    assert len({card.digest for card in cards}) == 3, "no worker continues another's answer"
    with pytest.raises(ModelLoadError, match=r"there is no 'hermess'; there are auto, none, "):
        load(settings(tools_model, tool_parser="hermess"), quiet)


def test_F03_the_reasoning_parser_is_the_templates_or_the_options(thinking_model: Path) -> None:
    cards = [
        load(settings(thinking_model, reasoning_parser=name), quiet).card
        for name in ("auto", "mistral", "none")
    ]
    assert [(card.reasoning, card.reasoning_parser) for card in cards] == [
        (True, "think"),
        (True, "mistral"),
        (False, ""),
    ]
    assert len({card.digest for card in cards}) == 3, "no worker continues another's answer"
    with pytest.raises(ModelLoadError, match=r"there is no 'qwen33'; there are auto, none, "):
        load(settings(thinking_model, reasoning_parser="qwen33"), quiet)


def test_F02_a_template_with_tools_and_no_parser_is_said(copied: Path) -> None:
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ tools }}{{ messages[0].content }}"
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    with capture_logs() as logged:
        card = load(settings(copied), quiet).card
    assert (card.tools, card.tool_parser, card.template_tools) == (False, "", True)
    assert "the model's tool calls are left in its text" in [line["event"] for line in logged]


def test_B07_a_template_that_reads_tools_nowhere_is_said(copied: Path) -> None:
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ mood }}{{ messages[0].content }}"
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    card = load(settings(copied), quiet).card
    assert (card.template_tools, card.template_variables) == (False, ("mood",))
    assert (card.tools, card.tool_parser) == (True, "json_tools")
    assert in_words(card)["tools"].startswith("described in the system message")
    unread = load(settings(copied, tool_parser="none"), quiet).card
    assert in_words(unread)["tool calls"].startswith("left in the text unless a request demands")


def test_N16_a_folder_with_a_scaled_context_or_an_option_for_it(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    rope = {"rope_theta": 10000.0, **YARN}
    config |= {"max_position_embeddings": 512, "rope_parameters": rope}
    (copied / "config.json").write_text(json.dumps(config))
    assert load(settings(copied), quiet).card.context == 2048
    assert load(settings(copied, context=100), quiet).card.context == 100


def test_M07_a_qwen3_with_yarn_has_the_factor_times_its_original_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    options = {"architecture": "qwen3", "context": 40960, "rope_scaling": yarn}
    folder = tiny.build(tmp_path, **options)
    assert load(settings(folder), quiet).card.context == 131072
    assert load(settings(folder, context=65536), quiet).card.context == 65536


@pytest.mark.parametrize(
    ("named", "scaling", "context"),
    [
        # As published, with what each family names as its max_position_embeddings.
        (131072, {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 8192}, 131072),  # Llama 3.1
        (131072, {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096}, 131072),  # gpt-oss
        (163840, {"type": "yarn", "factor": 40, ORIGINAL: 4096}, 163840),  # DeepSeek V3
        (16384, {"type": "linear", "factor": 4.0}, 16384),  # DeepSeek Coder
        (131072, {"rope_type": "linear", "factor": 8.0}, 131072),  # Gemma 3
        (4096, {"type": "dynamic", "factor": 2.0}, 4096),
        (128000, {"type": "mrope", "mrope_section": [16, 24, 24]}, 128000),  # Qwen2.5-VL
    ],
)
def test_M07_other_scalings_leave_the_context_that_a_configuration_names(
    named: int, scaling: dict[str, Any], context: int
) -> None:
    config = {"max_position_embeddings": named, "rope_scaling": scaling}
    assert context_of(config, object()).tokens == context


def test_M07_longrope_has_the_context_that_a_configuration_names() -> None:
    """The original context tells which of the two lists of factors a length takes."""
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {"max_position_embeddings": 131072, ORIGINAL: 4096, "rope_scaling": scaling}
    assert context_of(config, object()).tokens == 131072


def test_the_digest_knows_what_decides_the_answers(copied: Path) -> None:
    plain = settings(copied)
    seen = {digest(copied, plain, {})}
    assert digest(copied, dataclasses.replace(plain, slot="other", incarnation=9), {}) in seen
    seen.add(digest(copied, dataclasses.replace(plain, kv_bits=8), {}))
    seen.add(digest(copied, dataclasses.replace(plain, max_kv_size=128), {}))
    seen.add(digest(copied, plain, {"temperature": 0.6}))
    assert len(seen) == 4

    template = copied / "chat_template.jinja"
    before = template.read_text() if template.exists() else ""
    template.write_text(before + " ")
    seen.add(digest(copied, plain, {}))
    content = bytearray((copied / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copied / "model.safetensors").write_bytes(bytes(content))
    seen.add(digest(copied, plain, {}))
    assert len(seen) == 6


NAMED = "max_position_embeddings in config.json"
EXTENDED = "max_position_embeddings of 512, extended by rope_scaling in config.json"


@pytest.mark.parametrize(
    ("config", "limit", "context", "source"),
    [
        ({"max_position_embeddings": 128}, 64, 128, NAMED),
        ({"text_config": {"max_position_embeddings": 256}}, 64, 256, NAMED),
        ({"max_position_embeddings": 512, "rope_scaling": YARN}, 512, 2048, EXTENDED),
        ({"max_position_embeddings": 2048, "rope_scaling": YARN}, 512, 2048, NAMED),
        (
            {"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 2.5}},
            0,
            1280,
            EXTENDED,
        ),
        ({"max_position_embeddings": 512, "rope_scaling": LINEAR}, 512, 512, NAMED),
        (
            {"text_config": {"max_position_embeddings": 512, "rope_scaling": YARN}},
            0,
            2048,
            EXTENDED,
        ),
        ({"n_positions": 96}, 512, 96, "n_positions in config.json"),
        ({}, 512, 512, "model_max_length of the tokenizer"),
        ({}, int(1e30), 0, ""),
    ],
)
def test_N16_the_context_is_what_the_model_was_made_for(
    config: dict[str, Any], limit: int, context: int, source: str
) -> None:
    class Tokenizer:
        model_max_length = limit

    assert context_of(config, Tokenizer()) == (context, source)
