"""Parts of responses: counts, coloured pieces, token texts."""

from __future__ import annotations

import pytest

from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult, StreamEvent, Timing, Usage
from outrider.metrics import SpeculationStats
from outrider.sampling.params import SamplingParams
from outrider.serve.errors import ApiError
from outrider.serve.replies import StepPainter, finish_word, metrics_of, token_text, usage_of
from outrider.types import FinishReason, StepReport
from tests.models import _files
from tests.serve.support import ScriptedModel


def result(reason: FinishReason = FinishReason.STOP, **changes: object) -> GenerationResult:
    values: dict[str, object] = {
        "id": "a",
        "index": 0,
        "text": "",
        "token_ids": (),
        "finish_reason": reason,
        "usage": Usage(prompt_tokens=10, completion_tokens=4),
        "stats": SpeculationStats(),
        "timing": Timing(),
        "steps": (StepReport(tokens=(1,), rows=3, is_prefill=True),),
    }
    return GenerationResult(**{**values, **changes})  # type: ignore[arg-type]


def test_reasons() -> None:
    assert finish_word(result()) == "stop" and finish_word(result(), num_calls=1) == "tool_calls"
    assert finish_word(result(FinishReason.LENGTH), num_calls=1) == "length"
    for reason in set(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH}:
        with pytest.raises(ApiError) as caught:
            finish_word(result(reason))
        assert caught.value.status == 500
    dear = result(FinishReason.ERROR, error="structured_outputs met a limit on what a grammar may cost behind 4 tokens")
    with pytest.raises(ApiError) as caught:  # no fault of the server's
        finish_word(dear)
    assert caught.value.status == 400 and caught.value.param == "structured_outputs"


def test_each_prompt_counts_once() -> None:
    usage = usage_of([result(), result(index=1), result(id="b")])
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 12, 32)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 14}


def test_numbers_are_pooled_over_choices() -> None:
    steps = [
        StepReport(tokens=(1, 2, 3), drafted=4, accepted=2, reached=(1, 1, 1), kept=(1, 1, 0), drafter="x"),
        StepReport(tokens=(1,), drafted=4, accepted=0, reached=(1,), kept=(0,), drafter="x"),
        StepReport(tokens=(1,)),
    ]
    stats = SpeculationStats()
    for step in steps:
        stats.add(step)
    own = metrics_of([result(steps=tuple(steps), stats=stats), result(index=1)], 4)
    assert own["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [1, 0, 1, 0, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 8,
        "num_spec_tokens": 4,
    }
    assert own["outrider"]["passes"] == 3
    assert metrics_of([result()], None)["speculative_decoding"] is None
    assert metrics_of([result()], 4)["speculative_decoding"]["mean_acceptance_length"] is None


@pytest.mark.parametrize("stop", [(), ("sea was calm, and the lake",), ("was blue",)])
def test_pieces_join_to_the_text(stop: tuple[str, ...]) -> None:
    """Also where text is held back for a stop string that comes, or does not, and inside a character."""
    target = ScriptedModel()
    for prompt in ("a long story", "say 日本語"):
        painter = StepPainter(target.tokenizer)
        params = SamplingParams(max_tokens=300, stop=stop)
        said = []
        for event in Engine(target).stream([{"role": "user", "content": prompt}], params):
            pieces = painter.paint(event)["pieces"]
            assert "".join(piece["text"] for piece in pieces) == event.text
            said.append(event.text)
        assert "".join(said)


def test_kinds_of_tokens() -> None:
    tokenizer = _files.tokenizer()
    a, b, c = tokenizer.encode("a"), tokenizer.encode("b"), tokenizer.encode("c")
    ids = (*a, *b, *c)

    def kinds(report: StepReport) -> list[str]:
        event = StreamEvent(id="x", index=0, text="abc", token_ids=ids, report=report)
        return [piece["kind"] for piece in StepPainter(tokenizer).paint(event)["pieces"]]

    assert kinds(StepReport(tokens=ids, drafter="x", drafted=2, accepted=2)) == ["draft", "draft", "bonus"]
    refused = StepReport(tokens=ids, drafter="x", drafted=4, accepted=2, refused=(5,))
    assert kinds(refused) == ["draft", "draft", "correction"]
    assert kinds(StepReport(tokens=ids)) == ["plain"] * 3


def test_a_part_of_a_character_is_spelled_out() -> None:
    tokenizer = _files.tokenizer()
    first, *_ = tokenizer.encode("日")
    assert token_text(first, tokenizer) == ("\\xe6", [0xE6])
    assert token_text(2, tokenizer) == ("<|im_end|>", list(b"<|im_end|>"))
    assert token_text(7, None) == ("token_id:7", None)
