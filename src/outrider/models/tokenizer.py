"""Text to token ids and back, and chats to prompts.

Decoding is defined here, in bytes: a token is a piece of UTF-8, text is the decoded concatenation, and bytes that form no
character become U+FFFD. The streaming :class:`Detokenizer` runs the same rule a piece at a time, so that its pieces always
join to exactly what :meth:`Tokenizer.decode` gives.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from tokenizers import Tokenizer as Backend

from outrider.errors import PromptError, UnsupportedModel
from outrider.models.chat import ChatTemplate, ToolRendering

__all__ = ["Detokenizer", "Tokenizer"]

Style = Literal["byte_level", "sentencepiece"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: the ``tokenizers`` object.
        special_tokens: names such as ``bos_token`` to their text, as chat templates see them.
        eos_token_ids: tokens that end a generation.
        chat_template: Jinja source, ``None`` if the model has none.
        tool_template: Jinja source used instead when tools are given.
        tool_rendering: ``template`` lets the template render tools and refuses tools that it would ignore; ``system``
            renders them as JSON into the system message (:mod:`outrider.models.chat`).

    Raises:
        UnsupportedModel: a decoder that is neither byte-level nor SentencePiece with byte fallback.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
        tool_rendering: ToolRendering = "template",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._style, self.strips_first_blank = _decoding_style(backend)
        self._added = backend.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self._chat = ChatTemplate(
            source=chat_template,
            tool_source=tool_template,
            special_tokens=dict(special_tokens or {}),
            tool_rendering=tool_rendering,
        )
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_token_ids = frozenset(token for token, added in self._added.items() if added.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's logits may be wider (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def to_json(self) -> str:
        """Text of a ``tokenizer.json`` from which other engines build the same tokenizer."""
        text: str = self._backend.to_str()
        return text

    @property
    def template_hash(self) -> str:
        """Hash of everything that turns a chat into a prompt: template, special tokens, tool rendering."""
        return self._chat.hash

    def is_same_template(self, hash: str) -> bool:
        """True if a :attr:`template_hash` was made of this template, whoever rendered the tools."""
        return hash in {replace(self._chat, tool_rendering=rendering).hash for rendering in get_args(ToolRendering)}

    @property
    def tool_rendering(self) -> ToolRendering:
        """Who renders tools: the template, or :mod:`outrider.models.chat`."""
        return self._chat.tool_rendering

    def template_mentions(self, word: str) -> bool:
        """True if the source of the chat template, or of the one for tools, holds ``word``."""
        return any(word in source for source in (self._chat.source, self._chat.tool_source) if source)

    @property
    def has_chat_template(self) -> bool:
        """True if the model's files hold a chat template."""
        return self._chat.source is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Special tokens written in it are parsed as such; none is added.

        Raises:
            PromptError: not text, or text that UTF-8 cannot carry (lone surrogates).
        """
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Like :meth:`encode`, with the tokens that this model expects around raw text (such as a leading BOS)."""
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be text, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt holds half a character (a lone surrogate) at position {error.start}"
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As :meth:`encode`, with the characters of ``text`` that each token covers, ``(first, one past the last)``."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD, unknown ids nothing."""
        text = b"".join(self.piece(token, skip_special_tokens=skip_special_tokens) for token in ids)
        return self._strip_first(text).decode("utf-8", errors="replace")

    def _strip_first(self, text: bytes) -> bytes:
        return text.removeprefix(b" ") if self.strips_first_blank else text

    def piece(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to the text; may be part of a character."""
        if skip_special_tokens and token in self.special_token_ids:
            return b""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._piece(token)
        return found

    def _piece(self, token: int) -> bytes:
        if token in self._added:
            content: str = self._added[token].content
            return content.encode("utf-8")
        text = self._backend.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        return _byte_level_bytes(text) if self._style == "byte_level" else _sentencepiece_bytes(text)

    def token_text(self, token: int) -> str:
        """One token as readable text, special tokens as written; part of a character shows as U+FFFD."""
        return self.piece(token, skip_special_tokens=False).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token with this exact (stored) text, if there is one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the model's chat template makes of a chat.

        Args:
            messages: mappings with ``role`` and ``content`` (text, a list of text parts, or null for no text).
            tools: tool descriptions in OpenAI's form.
            add_generation_prompt: end with the head of the assistant's answer.

        Raises:
            PromptError: a malformed message, no template, tools that the template ignores, or an error in the template.
        """
        return self._chat.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def plain_messages(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The chat as another server must be sent it so that it renders the same prompt: with tool rendering ``system``
        tools and calls are text already, else the messages are unchanged."""
        return self._chat.plain_messages(messages, tools=tools)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of :meth:`render_chat`, with the generation prompt."""
        return self.encode(self.render_chat(messages, tools=tools))

    def vocabulary_hash(self) -> str:
        """Hash of all tokens' stored texts and ids; equal for tokenizers whose ids mean the same."""
        digest = hashlib.sha256()
        for text, token in sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda pair: pair[1]):
            digest.update(json.dumps([token, text]).encode())
        return digest.hexdigest()[:32]


class Detokenizer:
    """Turns a growing list of tokens into text that never changes again.

    The bytes of a character that is not complete yet are held back. Joined results of :meth:`add` and :meth:`finish`
    equal :meth:`Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_blank

    def add(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete; may be empty."""
        pieces = (self._tokenizer.piece(token, skip_special_tokens=self._skip_special_tokens) for token in ids)
        data = b"".join(pieces)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is still held back: nothing, or U+FFFD for characters that were never completed."""
        return self._utf8.decode(b"", final=True)


def _decoding_style(backend: Backend) -> tuple[Style, bool]:
    """How tokens become bytes, and whether the text loses one leading blank."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace, strip = steps[0], steps[-1]
        sound_strip = strip["type"] != "Strip" or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if replace["pattern"] == {"String": "▁"} and replace["content"] == " " and sound_strip:
            return "sentencepiece", strip["type"] == "Strip"
    raise UnsupportedModel(
        f"a tokenizer with decoder {' + '.join(kinds)} is not supported; "
        "allowed: ByteLevel, or Replace + ByteFallback + Fuse (+ Strip) of SentencePiece models"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if printable in Latin-1, else the next code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:  # a token outside the alphabet stands for itself
        return text.encode("utf-8")


def _sentencepiece_bytes(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    if match:
        return bytes([int(match[1], 16)])
    return text.replace("▁", " ").encode("utf-8")
