"""Drafters that read hidden states get those of every committed token, at its position; others cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.engine import idle
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, RowCosts
from outrider.engine.engine import Engine
from outrider.engine.taps import hand_over
from outrider.models.base import ForwardResult, PackedRows
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal, Verdict
from tests.engine.support import Scripted, oracle, random_chains, random_trees, right_trees, table_model

PROMPTS = [[1], [2, 3], [4, 5, 6, 0, 1], [3, 3, 3]]


class Listener(Scripted):
    """Checks what it is handed: a table's tap is the row's own token id."""

    taps = (3, 0)

    def __init__(self, inner: Scripted) -> None:
        super().__init__(inner._make, inner.name)
        self.absorbed: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}
        self.seen = 0

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        first = self.first.setdefault(sequence, start)
        known = self.absorbed.setdefault(sequence, [])
        assert start == first + len(known), "positions follow one another"
        assert taps_RD.shape[1] == 2 and torch.equal(taps_RD[:, 0], taps_RD[:, 1])
        known.extend(int(token) for token in taps_RD[:, 0].tolist())

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            first = self.first[request.sequence]
            assert self.absorbed[request.sequence] == list(request.tokens[first:-1]), "all but the last committed token"
            self.seen += 1
        return super().propose(requests)


def decode(drafter: Scripted | None, params: SamplingParams, **config: int) -> list[tuple[int, ...]]:
    settings = EngineConfig(num_draft_tokens=4, schedule="fixed", **config)  # type: ignore[arg-type]
    results = Engine(table_model(), drafter=drafter, config=settings).generate(PROMPTS, params)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("kind", ["chains", "trees", "right", "right trees"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3, "n": 3}])
@pytest.mark.parametrize("prefill_chunk", [2, 512])
def test_every_committed_tokens_taps_arrive(kind: str, fields: dict[str, float], prefill_chunk: int) -> None:
    params = SamplingParams(max_tokens=24, **fields)  # type: ignore[arg-type]
    plain = decode(None, params)
    n = params.n
    texts = [[*PROMPTS[index // n], *tokens] for index, tokens in enumerate(plain)]
    makers: dict[str, Callable[[], Scripted]] = {
        "chains": lambda: random_chains(1),
        "trees": lambda: random_trees(2),
        "right": lambda: oracle(lambda s: texts[s], wrong_at=2),
        "right trees": lambda: right_trees(lambda s: texts[s], 3),
    }
    listener = Listener(makers[kind]())
    assert decode(listener, params, prefill_chunk=prefill_chunk) == plain
    assert listener.seen > 20


def test_a_reused_prefix_has_no_taps() -> None:
    listener = Listener(random_chains(1))
    engine = Engine(table_model(), drafter=listener, config=EngineConfig(num_draft_tokens=4, schedule="fixed"))
    params = SamplingParams(max_tokens=20)
    [first] = engine.generate([[1, 2, 3]], params)
    engine.generate([[1, 2, 3, *first.token_ids, 4]], params)
    assert listener.first == {0: 0, 1: 22}
    assert listener.seen > 4


class Hearing:
    """Keeps what it is handed."""

    name, taps = "hearing", (5, 2)

    def __init__(self) -> None:
        self.heard: dict[int, tuple[int, Tensor]] = {}

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        self.heard[sequence] = (start, taps_RD)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_only_rows_of_those_who_listen_are_held(has_drafts: bool) -> None:
    """A view of the pass's own rows would keep a whole prompt in memory, or a batch for one sequence of it."""
    tokens = [(1, 2, 3), (4, 5), (6,), tuple(range(100))] if has_drafts else [(1,), (4,), (6,), tuple(range(100))]
    rows = PackedRows.pack(tokens, slots=range(4), starts=[7, 9, 30, 0], device=torch.device("cpu"))
    taps = {layer: layer * 1000.0 + torch.arange(len(rows.tokens_R)).unsqueeze(1) for layer in Hearing.taps}
    paths = [(1,), (0,), (), ()] if has_drafts else [()] * 4
    verdicts = [Verdict(path=path, next_token=0) for path in paths]
    starts = [7, 9, 30]
    for keys in [10, 11, 12], [10, None, 12], [None, 11, None], [None] * 3:
        drafter = Hearing()
        hand_over(drafter, keys, rows.segments, starts, verdicts, taps)  # type: ignore[arg-type]
        assert drafter.heard.keys() == {key for key in keys if key is not None}
        for key, (start, taps_RD) in drafter.heard.items():
            first = rows.segments[key - 10].start
            kept = [first, *(first + node + 1 for node in verdicts[key - 10].path)]
            assert start == starts[key - 10]
            assert taps_RD.tolist() == [[5000.0 + row, 2000.0 + row] for row in kept]
            assert taps_RD.untyped_storage().nbytes() == len(kept) * 2 * 4


class Patient(Listener):
    """A reader that runs a model, nothing of which is ever kept; passes may go by without its hidden states."""

    cost_key, nodes_per_level, levels, deepest, card_rates = "patient", 1.0, 100, 100, (0.0,)

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        known = self.absorbed.setdefault(sequence, [])
        if start != self.first.setdefault(sequence, start) + len(known):
            self.first[sequence] = start
            known.clear()
        super().absorb(sequence, start, taps_RD)

    def backlog(self, sequence: int, num_tokens: int) -> int:
        return 1


def test_passes_of_the_long_idle_compute_no_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle sequences' hidden states lapse; before the next try they are kept again, without a gap up to it."""
    asked: list[bool] = []
    forward = TableModel.forward

    def spy(self: TableModel, rows: PackedRows, cache: object, *, taps: Sequence[int] = ()) -> ForwardResult:
        asked.append(bool(taps))
        return forward(self, rows, cache, taps=taps)  # type: ignore[arg-type]

    monkeypatch.setattr(TableModel, "forward", spy)
    for name, value in (("TRY_SHARE", 0.0), ("FIRST_PURSE", 0.0), ("MOST_PURSE", 1e9)):
        monkeypatch.setattr(idle, name, value)
    costs = CostTable(passes=RowCosts(rows=(1, 8), ms=(10.0, 20.0)), drafts={"random": DraftCosts(fixed=30.0)})
    patient = Patient(random_chains(1))
    engine = Engine(table_model(), drafter=patient, costs=costs)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=400))
    for _ in range(200):
        engine.step()
    assert all(asked[: idle.LAPSE]) and not any(asked[idle.LAPSE + 5 :])
    assert patient.seen == 0
    engine.planner._purse.ms = 1000.0
    for _ in range(100):
        engine.step()
    assert patient.seen >= 1, "it was tried again, on hidden states up to the last token"
    assert any(asked[200:])


@pytest.mark.parametrize("kind", ["none", "scripted", "listener"])
def test_only_those_who_read_taps_ask_for_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, ...]] = set()
    forward = TableModel.forward

    def spy(self: TableModel, rows: PackedRows, cache: object, *, taps: Sequence[int] = ()) -> ForwardResult:
        asked.add(tuple(taps))
        return forward(self, rows, cache, taps=taps)  # type: ignore[arg-type]

    monkeypatch.setattr(TableModel, "forward", spy)
    drafter = {"none": None, "scripted": random_chains(1), "listener": Listener(random_chains(1))}[kind]
    decode(drafter, SamplingParams(max_tokens=5))
    assert asked == {(3, 0) if kind == "listener" else ()}
