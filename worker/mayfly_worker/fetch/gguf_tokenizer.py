"""A tokenizer from a GGUF file's metadata: byte-level BPE in the way of SmolLM.

The file has the tokens in order, the merges, and each token's type. How text is cut before the
merges is not in it but meant by a name (``tokenizer.ggml.pre``), so only a known one is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mayfly_worker.fetch.errors import FetchError

_CONTROL = 3
_USER_DEFINED = 4
"""Types of tokens that are matched whole, before text is cut; control tokens are special."""

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write(metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Raises:
        FetchError: the file's tokenizer is of another kind.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    roles = {
        role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()]
        for role, key in _ROLES.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **roles,
    }
    build(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def build(metadata: dict[str, Any]) -> Any:
    """The ``tokenizers.Tokenizer``; its ids are the tokens' places in the file.

    Raises:
        FetchError: the file's tokenizer is of another kind.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise FetchError(f"The GGUF file's tokenizer is {kind}; only SmolLM's can be converted.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
