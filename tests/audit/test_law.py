"""The audit proves the real verifiers lossless, and rejects every broken one that is switched on in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.audit.cases import KINDS
from outrider.audit.law import TOLERANCE, LawReport, audit_law
from outrider.errors import ConfigError
from outrider.rng import Purpose, noise_key
from outrider.sampling import laws as laws_module
from outrider.sampling import warp as warp_module
from outrider.sampling.state import SamplingState
from outrider.types import Proposal, Verdict
from outrider.verify import chain as chain_module
from outrider.verify import compare as compare_module
from outrider.verify import select as select_module
from outrider.verify.base import Place, StepLaws

Patch = Callable[[pytest.MonkeyPatch], None]


def worst_by_kind(report: LawReport) -> dict[str, float]:
    return {row.kind: row.worst for row in report.rows}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_real_verifiers_are_lossless(seed: int) -> None:
    report = audit_law(num_cases=80, seed=seed)
    assert report.is_lossless, worst_by_kind(report)
    assert report.worst < TOLERANCE
    assert [row.kind for row in report.rows] == list(KINDS)
    assert all(row.cases == 20 for row in report.rows)
    assert all(row.branches >= 3 * row.cases for row in report.rows)


def test_report_as_json() -> None:
    report = audit_law(num_cases=4, seed=3)
    found = report.to_json()
    assert found["verdict"] == report.verdict == "lossless"
    assert found["cases"] == report.cases == 4
    assert [row["kind"] for row in found["rows"]] == list(KINDS)
    assert audit_law(num_cases=4, seed=3) == report


def test_too_few_cases_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 cases are too few; give 4 or more"):
        audit_law(num_cases=3)


def accepts_by_square_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts(target: Tensor, draft: Tensor, u: Tensor) -> Tensor:
        return u < (target.double() / draft.double()).sqrt()

    monkeypatch.setattr(chain_module, "accepts_B", accepts)


def accepts_a_little_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts(target: Tensor, draft: Tensor, u: Tensor) -> Tensor:
        return u * draft.double() * (1 - 1e-9) < target.double()

    monkeypatch.setattr(chain_module, "accepts_B", accepts)


def accepts_what_the_target_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typical acceptance: no look at the draft law."""
    monkeypatch.setattr(chain_module, "accepts_B", lambda target, draft, u: target > 0.3)


def accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "accepts_B", lambda target, draft, u: torch.ones_like(u, dtype=torch.bool))


def residual_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "residual_BV", lambda target, draft: target)


def residual_with_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chain_module, "residual_BV", lambda target, draft: (draft - target).clamp_min(0) + (target == draft) * 1.0
    )


def residual_without_the_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right for a deterministic candidate is wrong for a drawn one."""

    def residual(target: Tensor, draft: Tensor) -> Tensor:
        return target.masked_fill(draft == draft.amax(dim=-1, keepdim=True), 0) + 1e-12

    monkeypatch.setattr(chain_module, "residual_BV", residual)


def bonus_from_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chain_module._place

    def choose(
        proposals: Sequence[Proposal], laws: StepLaws, sequences: Sequence[int], num_kept: Sequence[int], out: list[int]
    ) -> None:
        whole = [walk for walk, token in enumerate(out) if token < 0]
        places = [real(proposals[w], max(num_kept[w] - 1, 0), sequences[w]) for w in whole]
        for walk, token in zip(whole, laws.choose(places) if whole else (), strict=True):
            out[walk] = token

    monkeypatch.setattr(chain_module, "_choose_bonus", choose)


def bonus_with_the_history_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right row, wrong history: only penalties and bans notice."""
    real = chain_module._place
    monkeypatch.setattr(chain_module, "_place", lambda *args: real(*args)._replace(path=()))


def draft_law_of_the_next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chain_module._draft_probs_BV

    def shifted(chains: Sequence[Proposal], level: int, like: Tensor) -> Tensor:
        return torch.cat([real([chain], (level + 1) % len(chain), like) for chain in chains])

    monkeypatch.setattr(chain_module, "_draft_probs_BV", shifted)


def drawn_chains_are_compared_by_ratio_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection as if the draft had been the argmax: keep with probability target(token)."""
    real = chain_module._draft_probs_BV

    def sure(chains: Sequence[Proposal], level: int, like: Tensor) -> Tensor:
        return (real(chains, level, like) > 0).to(like.dtype)

    monkeypatch.setattr(chain_module, "_draft_probs_BV", sure)


CHAIN_MUTANTS: list[Patch] = [
    accepts_by_square_root,
    accepts_a_little_too_much,
    accepts_what_the_target_likes,
    accepts_everything,
    residual_from_target,
    residual_with_wrong_sign,
    residual_without_the_token_only,
    bonus_from_the_row_before,
    bonus_with_the_history_of_the_root,
    draft_law_of_the_next_level,
    drawn_chains_are_compared_by_ratio_one,
]


@pytest.mark.parametrize("mutant", CHAIN_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_rejection_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    found = worst_by_kind(audit_law(num_cases=40, seed=0))
    assert found["rejection chain"] > 1e-10
    assert found["compare chain"] < TOLERANCE


def keeps_any_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks on through the first child, whatever was drawn."""
    real = compare_module._children_by_token

    class AnyChild(dict[tuple[int, int], int]):
        def get(self, key: Any, default: Any = None) -> Any:
            children = [child for (parent, _), child in self.items() if parent == key[0]]
            return children[0] if children else default

    monkeypatch.setattr(compare_module, "_children_by_token", lambda proposal: AnyChild(real(proposal)))


def stands_at_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws of kept nodes are read one row too high."""
    real = compare_module._place

    def place(proposal: Proposal, path: Sequence[int], sequence: int) -> Place:
        return real(proposal, path, sequence)._replace(node=path[-2] if len(path) > 1 else -1)

    monkeypatch.setattr(compare_module, "_place", place)


def forgets_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compare_module._place
    monkeypatch.setattr(compare_module, "_place", lambda *args: real(*args)._replace(path=()))


def prefers_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits the first draft token when the draw was none of the children."""
    real = compare_module.verify_compare

    def biased(proposals: Sequence[Proposal], laws: StepLaws, sequences: Sequence[int]) -> list[Verdict]:
        verdicts = real(proposals, laws, sequences)
        return [
            Verdict(path=(), next_token=p.tokens[0]) if not v.path and p.tokens else v
            for p, v in zip(proposals, verdicts, strict=True)
        ]

    monkeypatch.setattr(select_module, "verify_compare", biased)


@pytest.mark.parametrize("mutant", [keeps_any_child, stands_at_the_parent, forgets_the_path, prefers_drafted_tokens])
def test_broken_comparison_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    found = worst_by_kind(audit_law(num_cases=80, seed=0))
    assert found["compare chain"] > 1e-10 or found["compare tree"] > 1e-10
    assert found["rejection chain"] < TOLERANCE


def penalties_see_only_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SamplingState.seen_counts
    monkeypatch.setattr(SamplingState, "seen_counts", lambda self, path: real(self, ()))


def bans_see_only_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SamplingState.banned_tokens
    monkeypatch.setattr(SamplingState, "banned_tokens", lambda self, path: real(self, ()))


def every_node_reads_the_root_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws_module.ProcessedLaws, "_row", lambda self, place: self._first_rows[place.sequence])


@pytest.mark.parametrize(
    "mutant", [penalties_see_only_the_output, bans_see_only_the_output, every_node_reads_the_root_row]
)
def test_broken_history_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    report = audit_law(num_cases=60, seed=0)
    assert report.verdict == "biased"
    assert all(worst_by_kind(report)[kind] > 1e-10 for kind in ("compare tree", "rejection chain"))


def noise_of_the_step_not_of_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that forget the draft tokens before a node: seeded output then depends on the proposal."""

    def keys(self: laws_module.ProcessedLaws, places: Sequence[Place], purpose: Purpose) -> list[int]:
        states = [self._states[place.sequence] for place in places]
        return [noise_key(s.seed, s.choice, s.num_prompt + s.num_output, purpose) for s in states]

    monkeypatch.setattr(laws_module.ProcessedLaws, "_keys", keys)


def noise_by_batch_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(self: laws_module.ProcessedLaws, places: Sequence[Place], purpose: Purpose) -> list[int]:
        seeds = [self._states[place.sequence].seed for place in places]
        return [noise_key(seed, 0, row, purpose) for row, seed in enumerate(seeds)]

    monkeypatch.setattr(laws_module.ProcessedLaws, "_keys", keys)


@pytest.mark.parametrize("mutant", [noise_of_the_step_not_of_the_position, noise_by_batch_row])
def test_broken_noise_keys_are_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert worst_by_kind(audit_law(num_cases=40, seed=0))["seeded compare"] > 0.01


def test_a_cut_that_depends_on_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """top_p of the most generous row, for all rows."""
    real = warp_module.heads_of_group

    def generous(logits: Tensor, rows: Sequence[int], num_top: int, top_ps: Sequence[float]) -> list[warp_module.Head]:
        return real(logits, rows, num_top, [max(top_ps)] * len(rows))

    monkeypatch.setattr(warp_module, "heads_of_group", generous)
    assert audit_law(num_cases=120, seed=0).verdict == "biased"
