"""The audit finds what is wrong, excuses what is rounding, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.audit.control import FLOAT32_CAP
from outrider.audit.identity import (
    IdentityReport,
    audit_identity,
    explain,
    first_difference,
    forced_logits,
    run_control,
)
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.errors import ConfigError
from outrider.models.base import ForwardResult, GreedyResult, PackedRows
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal, Verdict
from tests.engine.support import VOCAB, Scripted, all_drafters, random_chains, table_model
from tests.models._tiny import logits_alone, tiny_target, token_ids

PROMPTS = {"a": [1, 2, 3], "b": [4, 4], "c": [6]}
SAMPLING = {
    "greedy": SamplingParams(max_tokens=20),
    "seeded": SamplingParams(max_tokens=20, temperature=1.2, seed=5),
    "cut": SamplingParams(max_tokens=20, temperature=1.2, seed=6, top_k=3, top_p=0.9, min_p=0.01),
}
ONE = EngineConfig(max_batch_size=1)


def audit(
    target: Any,
    *,
    drafters: Mapping[str, Callable[[], Any]] | None = None,
    sampling: Mapping[str, SamplingParams] = SAMPLING,
    config: EngineConfig | None = None,
    ks: Sequence[int] = (1, 4),
) -> IdentityReport:
    return audit_identity(
        target,
        PROMPTS,
        drafters=drafters or all_drafters(),
        num_draft_tokens=ks,
        sampling=sampling,
        config=config,
    )


class RowSensitive:
    """A table whose logits of one token grow in passes of more than one row, as rounding makes real ones move."""

    def __init__(self, table: TableModel, *, token: int, change: float) -> None:
        self._table = table
        self._token = token
        self._change = change
        self.spec = table.spec
        self.tokenizer = None

    def new_cache(self) -> Any:
        return self._table.new_cache()

    def forward(self, rows: PackedRows, cache: Any, *, taps: Sequence[int] = ()) -> ForwardResult:
        logits_RV = self._table.forward(rows, cache, taps=taps).logits_RV.clone()
        if len(rows.tokens_R) > 1 and rows.logit_rows is None:
            logits_RV[:, self._token] += self._change
        return ForwardResult(logits_RV=logits_RV)

    def forward_greedy(self, rows: PackedRows, cache: Any, *, taps: Sequence[int] = ()) -> GreedyResult:
        return GreedyResult(tokens_R=self.forward(rows, cache, taps=taps).logits_RV.argmax(dim=-1))

    def num_weight_bytes(self) -> int:
        return 0


def two_best(gap: float) -> TableModel:
    """Everywhere token 2 is best and token 5 is ``gap`` below."""
    logits = torch.zeros(VOCAB, VOCAB)
    logits[:, 2], logits[:, 5] = 4.0, 4.0 - gap
    return TableModel(logits)


def test_sound_speculation_is_identical_everywhere() -> None:
    report = audit(table_model())
    assert report.is_lossless and not report.differences
    assert {arm.verdict for arm in report.arms} == {"identical"}
    assert len(report.arms) == len(all_drafters()) * 2 * len(SAMPLING)
    assert all(arm.drafted > 0 and arm.num_identical == arm.num_outputs == len(PROMPTS) for arm in report.arms)
    assert report.control.tolerance == 0 and report.control.num_flips == 0


def accept_everything(proposals: Sequence[Proposal], laws: Any, sequences: Any = None) -> list[Verdict]:
    return [
        Verdict(path=tuple(range(len(proposal))) if proposal.is_chain else (), next_token=0) for proposal in proposals
    ]


def test_a_verifier_that_accepts_everything_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = audit(table_model(), drafters={"random": lambda: random_chains(1)})
    assert plain.is_lossless
    from outrider.engine import judge

    honest = judge.verify

    def sometimes(proposals: Sequence[Proposal], laws: Any, sequences: Any = None) -> list[Verdict]:
        verifier = accept_everything if any(len(proposal) for proposal in proposals) else honest
        return verifier(proposals, laws)

    monkeypatch.setattr(judge, "verify", sometimes)
    report = audit(table_model(), drafters={"random": lambda: random_chains(1)})
    assert not report.is_lossless
    assert {arm.verdict for arm in report.arms} == {"bug"}
    first = report.differences[0]
    assert first.gap is not None and first.gap > first.tolerance
    assert first.plain_token != first.speculative_token and first.arm == "random, k=1" and first.sampling == "greedy"


def test_rounding_at_a_tie_is_excused_by_the_control() -> None:
    target = RowSensitive(two_best(1e-6), token=5, change=2e-6)
    report = audit(
        target, drafters={"random": lambda: random_chains(1)}, config=ONE, sampling={"g": SAMPLING["greedy"]}
    )
    assert report.is_lossless and {arm.verdict for arm in report.arms} == {"tie"}
    assert report.control.num_flips > 0 and 2e-6 < report.control.tolerance < 1e-5
    difference = report.differences[0]
    assert difference.gap == pytest.approx(1e-6, rel=0.5) and {
        difference.plain_token,
        difference.speculative_token,
    } == {
        2,
        5,
    }


def test_in_float32_no_control_excuses_a_wide_gap() -> None:
    target = RowSensitive(two_best(5e-4), token=5, change=1e-3)
    report = audit(
        target, drafters={"random": lambda: random_chains(1)}, config=ONE, sampling={"g": SAMPLING["greedy"]}
    )
    assert report.control.deviation > 5e-4 and report.control.tolerance == FLOAT32_CAP
    assert not report.is_lossless and report.differences[0].verdict == "bug"


def test_no_drafts_prove_nothing() -> None:
    silent = {"silent": lambda: Scripted(lambda request: Proposal())}
    assert {arm.verdict for arm in audit(table_model(), drafters=silent).arms} == {"void"}
    assert {arm.verdict for arm in audit(table_model(), drafters=silent, ks=(0,)).arms} == {"identical"}


def plain_result(target: Any, prompt: Sequence[int], params: SamplingParams) -> GenerationResult:
    [result] = Engine(target, config=ONE).generate([list(prompt)], params)
    return result


@pytest.mark.parametrize("ids", [(), (1,), (1, 2, 3)])
def test_an_output_that_just_ends_is_a_bug(ids: tuple[int, ...]) -> None:
    target = two_best(0.0)
    params = SamplingParams(max_tokens=4)
    plain = replace(plain_result(target, [1], params), token_ids=(1, 2, 3, 4))
    found = explain(target, [1], plain, replace(plain, token_ids=ids), params=params, tolerance=1.0)
    assert found is not None and found.verdict == "bug" and found.gap is None and found.index == len(ids)
    assert found.plain_token == (1, 2, 3, 4)[len(ids)] and found.speculative_token is None


CUTS = [
    ({"top_k": 2}, [4.0, 3.0, 3.0 - 1e-6, 0.0], [4.0, 3.0, 2.0, 0.0]),
    ({"min_p": 0.5}, [4.0, 3.9, 4.0 - 0.6931472 - 1e-6, 0.0], [4.0, 3.9, 3.0, 0.0]),
    ({"top_p": 0.6666666}, [4.0, 4.0, 4.0 - 1e-7, -20.0], [4.0, 4.0, 2.0, -20.0]),
]


@pytest.mark.parametrize(("fields", "near", "far"), CUTS)
def test_a_token_at_a_cut_is_a_tie_and_one_far_below_is_not(
    fields: dict[str, Any], near: list[float], far: list[float]
) -> None:
    """Token 2 is cut off in plain decoding; speculation produced it."""
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, **fields)
    for logits, verdict in ((near, "tie"), (far, "bug")):
        target = TableModel(torch.tensor([logits] * 4))
        plain = plain_result(target, [1], params)
        assert plain.token_ids[0] != 2
        found = explain(target, [1], plain, replace(plain, token_ids=(2,)), params=params, tolerance=1e-5)
        assert found is not None and found.verdict == verdict
        assert found.gap == float("inf") and found.cut_margin is not None


def test_scores_of_seeded_requests_hold_noise_and_penalties() -> None:
    """The best score behind any prefix of a plain output is that of its next token."""
    target = table_model()
    params = SamplingParams(
        max_tokens=12, temperature=0.9, seed=3, presence_penalty=0.7, repetition_penalty=1.3, logit_bias={2: 1.5}
    )
    plain = plain_result(target, [1, 2], params)
    for index, token in enumerate(plain.token_ids):
        other = (*plain.token_ids[:index], (token + 1) % VOCAB)
        found = explain(target, [1, 2], plain, replace(plain, token_ids=other), params=params, tolerance=0.0)
        assert found is not None and found.index == index and found.gap is not None
        assert found.top2_gap is not None and found.gap >= found.top2_gap > 0
        same = explain(target, [1, 2], plain, replace(plain, token_ids=plain.token_ids), params=params, tolerance=0.0)
        assert same is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_first_difference_is_the_end_of_the_common_prefix(left: list[int], right: list[int]) -> None:
    index = first_difference(left, right)
    assert (index is None) == (left == right)
    if index is not None:
        assert left[:index] == right[:index]
        assert left[index : index + 1] != right[index : index + 1]


def test_forced_logits_are_those_of_reading_the_whole_text() -> None:
    target = tiny_target()
    prompts = [token_ids(9, seed=1), token_ids(4, seed=2)]
    continuations = [token_ids(3, seed=3), token_ids(6, seed=4)]
    forced = forced_logits(target, prompts, continuations, prefill_chunk=4)
    last = forced_logits(target, prompts, continuations, prefill_chunk=4, is_last_only=True)
    for prompt, continuation, logits_TV, last_1V in zip(prompts, continuations, forced, last, strict=True):
        whole_RV = logits_alone(target, [*prompt, *continuation])
        torch.testing.assert_close(logits_TV, whole_RV[len(prompt) - 1 :], rtol=0, atol=1e-4)
        torch.testing.assert_close(last_1V, logits_TV[-1:], rtol=0, atol=1e-4)


def test_the_control_of_a_real_runtime_is_small_and_not_empty() -> None:
    target = tiny_target("bfloat16")
    params = SamplingParams(max_tokens=12)
    prompts = {"a": token_ids(9, seed=1), "b": token_ids(4, seed=2)}
    results = Engine(target, config=ONE).generate(list(prompts.values()), params)
    control = run_control(target, prompts, results)
    assert control.num_positions == sum(len(result.token_ids) for result in results) + 2
    assert 0 <= control.tolerance < 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": {}}, "one prompt"),
        ({"drafters": {}}, "one drafter"),
        ({"num_draft_tokens": ()}, "number of draft tokens"),
        ({"sampling": {}}, "one sampling"),
        ({"sampling": {"hot": SamplingParams(temperature=1.0)}}, "fresh noise"),
        ({"sampling": {"two": SamplingParams(temperature=1.0, seed=1, n=2)}}, "n = 2"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes: dict[str, Any], words: str) -> None:
    request: dict[str, Any] = {
        "prompts": PROMPTS,
        "drafters": all_drafters(),
        "num_draft_tokens": (2,),
        "sampling": SAMPLING,
    }
    with pytest.raises(ConfigError, match=words):
        audit_identity(table_model(), **{**request, **changes})


def test_the_report_is_json() -> None:
    report = audit(two_best(0.0), drafters={"random": lambda: random_chains(1)})
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["is_lossless"] is True
    assert {"target", "precision", "control", "arms", "differences"} <= set(plain)
