"""Text to tokens and back; streamed text equals text decoded at once, for any tokens cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.errors import PromptError, UnsupportedModel
from outrider.models.tokenizer import Detokenizer, Tokenizer
from tests.models import _files

BYTE_LEVEL = _files.tokenizer()
SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "▁", "▁he", "llo", "é", "▁▁x", *(f"<0x{byte:02X}>" for byte in range(256))]


def _sentencepiece() -> Tokenizer:
    backend = Backend(
        models.BPE(vocab={t: i for i, t in enumerate(SENTENCEPIECE_TOKENS)}, merges=[], byte_fallback=True)
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend)


SENTENCEPIECE = _sentencepiece()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}


def test_special_tokens_in_text_are_parsed_and_none_is_added() -> None:
    assert BYTE_LEVEL.encode("<|im_start|>hell<|im_end|>") == [1, BYTE_LEVEL.token_id("hell"), 2]
    assert BYTE_LEVEL.encode("") == []
    assert BYTE_LEVEL.encode("<|im_start") != [1]


def test_digits_are_single_tokens() -> None:
    assert [BYTE_LEVEL.token_text(token) for token in BYTE_LEVEL.encode("1234 w")] == ["1", "2", "3", "4", " w"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>a<|im_end|>")
    assert BYTE_LEVEL.decode(ids) == "a"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert BYTE_LEVEL.token_text(1) == "<|im_start|>"


def test_unknown_ids_are_no_text() -> None:
    assert BYTE_LEVEL.decode([-1, 10**9, BYTE_LEVEL.token_id("hell") or 0]) == "hell"


@pytest.mark.parametrize("text", ["half a character \ud800", "\udfff"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(PromptError, match="lone surrogate"):
        BYTE_LEVEL.encode(text)


def test_prompts_must_be_text() -> None:
    with pytest.raises(PromptError, match="not bytes"):
        BYTE_LEVEL.encode(b"hello")  # type: ignore[arg-type]


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_streamed_text_equals_text_decoded_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    groups = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4), max_size=12))
    skip = data.draw(st.booleans())
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [stream.add(group) for group in groups]
    pieces.append(stream.finish())
    ids = [token for group in groups for token in group]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30))
@settings(max_examples=200, deadline=None)
def test_decoding_equals_the_librarys(ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(ids) == _files.backend().decode(ids, skip_special_tokens=True)


def test_half_characters_are_held_back_until_they_are_whole() -> None:
    stream = Detokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("a😀b")
    assert len(ids) == 6
    assert [stream.add([token]) for token in ids] == ["a", "", "", "", "😀", "b"]
    assert stream.finish() == ""
    assert stream.add(ids[1:3]) == "" and stream.finish() == "\ufffd"


def test_sentencepiece_drops_one_leading_blank_of_the_whole_text() -> None:
    stream = Detokenizer(SENTENCEPIECE)
    assert [stream.add([3]), stream.add([4]), stream.add([3]), stream.finish()] == ["he", "llo", " he", ""]
    assert SENTENCEPIECE.decode([1, 6]) == " x"
    byte_ids = [SENTENCEPIECE_TOKENS.index(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert SENTENCEPIECE.decode(byte_ids) == "€"


def test_other_decoders_are_refused_by_name() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)


def test_truncation_of_the_file_does_not_cut_prompts() -> None:
    backend = _files.backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    assert len(Tokenizer(backend).encode("hello world")) == len(BYTE_LEVEL.encode("hello world"))


def test_vocabulary_hash_tells_vocabularies_apart() -> None:
    assert BYTE_LEVEL.vocabulary_hash() == Tokenizer(_files.backend()).vocabulary_hash()
    other = _files.backend()
    other.add_tokens(["one more"])
    assert Tokenizer(other).vocabulary_hash() != BYTE_LEVEL.vocabulary_hash()


@pytest.mark.real_model
def test_tokens_of_the_real_model() -> None:
    """Written down from transformers' tokenizer of the same vocabulary with the published cutting rule (single digits)."""
    from outrider.models.load import load_checkpoint

    tokenizer = load_checkpoint("smollm2-135m-instruct").tokenizer
    assert tokenizer is not None
    expected = {
        "1234 5": [33, 34, 35, 36, 216, 37],
        "Hello world 12": [19556, 905, 216, 33, 34],
        "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
        " it's  3.14\n\n": [357, 506, 256, 35, 30, 33, 36, 1116],
        "日本 ½": [23274, 115, 40993, 216, 16738],
        "don't": [12420, 982],
    }
    for text, ids in expected.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.eos_token_ids == (2,)
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    head = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert prompt == head + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
