"""Builds the tokenizer that a GGUF file's metadata describes, equal to the model's Hugging Face tokenizer.

The metadata names the rule that cuts text before byte-pair merging; the expressions are those of the models' own
``tokenizer.json`` files. Rules that are not in the table are refused: a tokenizer that cuts a little differently gives
other tokens, and so another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from outrider.errors import UnsupportedModel, WeightsError
from outrider.models.chat import ToolRendering
from outrider.models.tokenizer import Tokenizer

__all__ = ["PRE_TOKENIZERS", "gguf_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_CONTRACTION_OR_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_OR_BLANKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_LLAMA3 = _CONTRACTION_OR_WORD + r"\p{N}{1,3}" + _SIGNS_OR_BLANKS
_SPLIT_QWEN2 = _CONTRACTION_OR_WORD + r"\p{N}" + _SIGNS_OR_BLANKS


def _byte_level(*, use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([cut, _byte_level(use_regex=False)])

    return build


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "llama-bpe": _split(_SPLIT_LLAMA3),
    "llama3": _split(_SPLIT_LLAMA3),
    "llama-v3": _split(_SPLIT_LLAMA3),
    "qwen2": _split(_SPLIT_QWEN2),
}
"""Value of ``tokenizer.ggml.pre`` to the rule that cuts text."""

_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3")
_NFC = ("qwen2",)


def gguf_tokenizer(metadata: Mapping[str, Any], where: str, *, tool_rendering: ToolRendering = "template") -> Tokenizer:
    """Build the tokenizer from the keys ``tokenizer.*``.

    Args:
        metadata: of :class:`outrider.models.gguf_file.GGUFFile`.
        where: the file, for error texts.
        tool_rendering: see :class:`Tokenizer`.

    Raises:
        UnsupportedModel: a tokenizer model or cutting rule that is not in the table.
        WeightsError: vocabulary, merges or token types that contradict each other.
    """
    vocabulary = _Vocabulary(metadata, where)
    return Tokenizer(
        _backend(vocabulary),
        special_tokens=vocabulary.special_tokens(),
        eos_token_ids=vocabulary.eos_token_ids(),
        chat_template=_template(metadata, "tokenizer.chat_template"),
        tool_template=_template(metadata, "tokenizer.chat_template.tool_use"),
        tool_rendering=tool_rendering,
    )


def _template(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


class _Vocabulary:
    """The tokenizer keys, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedModel(
                f"{where}: tokenizer model {str(model)[:40]!r} is not supported in GGUF; allowed: gpt2 (byte-level BPE); "
                "give the model's Hugging Face folder instead"
            )
        self.pre = metadata.get("tokenizer.ggml.pre")
        if self.pre not in PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"{where}: pre-tokenizer {str(self.pre)[:40]!r} is not supported; allowed: {', '.join(PRE_TOKENIZERS)}; "
                "give the model's Hugging Face folder instead"
            )
        self.tokens = self._texts("tokenizer.ggml.tokens")
        self.merges = [self._pair(merge) for merge in self._texts("tokenizer.ggml.merges")]
        self.kinds = self._kinds()

    def _texts(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not value:
            raise WeightsError(f"{self.where}: the metadata lacks {key}, a list of texts")
        return value

    def _pair(self, merge: str) -> tuple[str, str]:
        left, blank, right = merge.partition(" ")
        if not (left and blank and right) or " " in right:
            raise WeightsError(f"{self.where}: merge {merge[:40]!r} is not two tokens with a blank between")
        return left, right

    def _kinds(self) -> Sequence[int]:
        kinds = self._metadata.get("tokenizer.ggml.token_type")
        if kinds is None:
            return [1] * len(self.tokens)
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(self.tokens):
            raise WeightsError(
                f"{self.where}: token_type does not hold one number for each of {len(self.tokens)} tokens"
            )
        listed: list[int] = kinds.tolist()
        return listed

    def special_id(self, name: str) -> int | None:
        """The id under ``tokenizer.ggml.{name}_token_id``, or ``None``."""
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise WeightsError(f"{self.where}: {name}_token_id {value!r} is not one of {len(self.tokens)} tokens")
        return value

    def special_tokens(self) -> dict[str, str]:
        """What a chat template sees as ``bos_token``, ``eos_token`` and so on."""
        found = {field: self.special_id(name) for name, field in _SPECIAL_TOKENS.items()}
        return {field: self.tokens[token] for field, token in found.items() if token is not None}

    def eos_token_ids(self) -> tuple[int, ...]:
        found = [self.special_id(name) for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def flag(self, name: str) -> bool:
        """The truth value under ``tokenizer.ggml.{name}``; false if it is not there."""
        return self._metadata.get(f"tokenizer.ggml.{name}") is True


def _backend(vocabulary: _Vocabulary) -> Backend:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise WeightsError(f"{vocabulary.where}: {len(vocabulary.tokens) - len(ids)} tokens appear twice")
    ignore_merges = vocabulary.pre in _IGNORE_MERGES
    try:
        backend = Backend(models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception for merges that are not in the vocabulary
        raise WeightsError(f"{vocabulary.where}: the tokenizer cannot be built: {error}") from None
    backend.pre_tokenizer = PRE_TOKENIZERS[str(vocabulary.pre)]()
    backend.decoder = decoders.ByteLevel()
    if vocabulary.pre in _NFC:
        backend.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, each in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
            if each == kind and token
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    _add_bos(backend, vocabulary)
    return backend


def _add_bos(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Make raw prompts start (and end) with the tokens that the model was trained to see there."""
    bos, eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
    before = [bos] if vocabulary.flag("add_bos_token") and bos is not None else []
    after = [eos] if vocabulary.flag("add_eos_token") and eos is not None else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(f"s{token}" for token in before), "$A", *(f"s{token}" for token in after)],
            special_tokens=[(f"s{token}", token) for token in dict.fromkeys([*before, *after])],
        )
