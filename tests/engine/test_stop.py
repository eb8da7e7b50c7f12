"""Stop rules inside a run of many tokens: ids, strings, limits, and text that is handed out while it grows."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.engine.stop import OutputText, StopRules
from outrider.models.table import TableModel
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason
from tests.engine.support import oracle, random_trees, table_model

PROMPT = [1, 2]
PIECES = ("a", "b", "ab", "c", "Ġd", "Ã", "©")
"""Texts of the seven tokens in the byte alphabet; the last two are the halves of one character."""


def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE(vocab={piece: token for token, piece in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def speaking_model() -> TableModel:
    model = table_model(5)
    model.tokenizer = tokenizer()  # type: ignore[assignment]
    return model


def fields(*, stop: tuple[str, ...] = (), min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=30, temperature=1.3, seed=4, stop=stop, min_tokens=min_tokens)


def plain_output() -> GenerationResult:
    return Engine(speaking_model()).generate([PROMPT], fields())[0]


def stopped(tokens: tuple[int, ...], stop: str, min_tokens: int = 0) -> tuple[int, str] | None:
    """Slowly: number of tokens and text of the output that ``stop`` ends, ``None`` where it never does."""
    decode = tokenizer().decode
    for count in range(max(1, min_tokens), len(tokens) + 1):
        before, text = decode(tokens[: count - 1]), decode(tokens[:count])
        found = text.find(stop, max(0, len(before) - len(stop) + 1))
        if found >= 0:
            return count, text[:found]
    return None


def stop_strings(text: str) -> list[str]:
    """Every string of two to four whole characters that the text holds, in a stable order."""
    found = {text[at : at + size] for size in (2, 3, 4) for at in range(len(text) - size + 1)}
    return sorted(stop for stop in found if "\ufffd" not in stop)


@pytest.mark.parametrize("kind", ["oracle", "trees"])
def test_stop_strings_end_the_output_where_they_are_completed(kind: str) -> None:
    plain = plain_output()
    strings = stop_strings(plain.text)
    assert len(strings) > 20
    multiple = 0
    for stop in strings:
        drafter = oracle(lambda _: [*PROMPT, *plain.token_ids]) if kind == "oracle" else random_trees(3)
        config = EngineConfig(num_draft_tokens=8, schedule="fixed")
        events = list(Engine(speaking_model(), drafter=drafter, config=config).stream(PROMPT, fields(stop=(stop,))))
        got = events[-1].result
        expected = stopped(plain.token_ids, stop)
        assert got is not None and expected is not None
        count, text = expected
        assert (got.token_ids, got.text) == (plain.token_ids[:count], text)
        assert got.finish_reason is FinishReason.STOP
        assert "".join(event.text for event in events) == got.text, "what was streamed can not be taken back"
        assert got.stats.committed == count - 1
        multiple += len(events) < count
    assert kind == "trees" or multiple > 10, "hardly any stop lay inside a run: the test is void"


@pytest.mark.parametrize("min_tokens", [2, 6, 11])
def test_stop_strings_before_min_tokens_do_not_count(min_tokens: int) -> None:
    plain = plain_output()
    for stop in stop_strings(plain.text)[::3]:
        [got] = Engine(speaking_model()).generate([PROMPT], fields(stop=(stop,), min_tokens=min_tokens))
        expected = stopped(plain.token_ids, stop, min_tokens)
        count, text = (len(plain.token_ids), plain.text) if expected is None else expected
        assert (len(got.token_ids), got.text) == (count, text)


def test_the_first_stop_string_of_several_cuts() -> None:
    text = OutputText(tokenizer(), ("bab", "ab"))
    assert [text.add(token, may_stop=True) for token in (3, 1)] == [False, False]
    assert text.add(2, may_stop=True)
    assert text.text == "c"


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    text = OutputText(tokenizer(), ("abc",))
    pieces = []
    for token in (0, 0, 1, 1, 5, 6):
        text.add(token, may_stop=True)
        pieces.append(text.take())
    assert pieces == ["", "a", "", "abb", "", "é"]
    text.finish()
    assert text.take() == ""


def test_half_a_character_is_shown_at_the_end_only() -> None:
    text = OutputText(tokenizer(), ())
    text.add(0, may_stop=True)
    text.add(5, may_stop=True)
    assert text.take() == "a"
    text.finish()
    assert text.take() == "\ufffd"


def scan(params: SamplingParams, tokens: tuple[int, ...], *, num_output: int = 0, limit: int = 10) -> object:
    rules = StopRules(params, eos_token_ids=(6,), limit=limit)
    return rules.scan(tokens, num_output=num_output, text=OutputText(None, ()))


def test_token_ids_end_a_run_where_they_stand() -> None:
    params = SamplingParams(stop_token_ids=(5,))
    assert scan(params, (1, 2, 3)) == (3, None)
    assert scan(params, (1, 5, 6)) == (2, FinishReason.STOP)
    assert scan(params, (6, 5, 1)) == (1, FinishReason.STOP)
    assert scan(SamplingParams(stop_token_ids=(5,), ignore_eos=True), (6, 1, 5)) == (3, FinishReason.STOP)
    assert scan(SamplingParams(ignore_eos=True), (6, 6)) == (2, None)


def test_the_limit_ends_a_run_and_a_stop_at_the_limit_is_a_stop() -> None:
    assert scan(SamplingParams(), (1, 2, 3, 4), num_output=7) == (3, FinishReason.LENGTH)
    assert scan(SamplingParams(), (1, 2, 6, 4), num_output=7) == (3, FinishReason.STOP)
    assert scan(SamplingParams(), (1, 2), num_output=7) == (2, None)
