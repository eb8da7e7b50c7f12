"""Several drafters behind one: everybody is told, one is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.drafters.base import DrafterWithPath, DraftRequest, ModelDrafter, TapDrafter
from outrider.drafters.build import make_drafter
from outrider.drafters.head_folder import save_head
from outrider.drafters.portfolio import Portfolio, TapPortfolio, members_of, portfolio_of
from outrider.errors import ConfigError
from outrider.models.llama import LlamaTarget
from outrider.types import Proposal

from .heads import tiny_head, tiny_info, tiny_target
from .helpers import wish


class Named:
    """Proposes its own number, and remembers what it was told."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.told: list[tuple[str, int]] = []

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        self.told.append(("start", sequence))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.told += [("propose", request.sequence) for request in requests]
        return [Proposal.chain([self.number], drafter=self.name) for _ in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        self.told.append(("observe", sequence))

    def finish(self, sequence: int) -> None:
        self.told.append(("finish", sequence))


class Reader(Named):
    """Reads hidden states, too."""

    path = "somewhere"

    def __init__(self, name: str, taps: tuple[int, ...]) -> None:
        super().__init__(name, 0)
        self.taps = taps
        self.seen: list[Tensor] = []

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        self.seen.append(taps_RD)


def for_drafter(name: str, sequence: int) -> DraftRequest:
    request = wish([1, 2, 3], 4, sequence=sequence)
    return DraftRequest(**{n: getattr(request, n) for n in DraftRequest.__slots__ if n != "drafter"}, drafter=name)


def test_each_request_is_answered_by_the_drafter_it_names() -> None:
    one, two = Named("one", 1), Named("two", 2)
    both = portfolio_of([one, two], name="auto:one,two")
    names = ["two", "one", "", "two"]
    found = both.propose([for_drafter(name, key) for key, name in enumerate(names)])
    assert [proposal.drafter for proposal in found] == ["two", "one", "one", "two"]
    assert one.told == [("propose", 1), ("propose", 2)] and two.told == [("propose", 0), ("propose", 3)]
    assert not isinstance(both, TapDrafter | DrafterWithPath | ModelDrafter)


def test_everybody_is_told_everything() -> None:
    one, two = Named("one", 1), Named("two", 2)
    both = portfolio_of([one, two], name="auto")
    both.start(5, [1])
    both.observe(5, [1, 2], 1)
    both.finish(5)
    assert one.told == two.told == [("start", 5), ("observe", 5), ("finish", 5)]
    assert members_of(both) == (one, two) and members_of(one) == (one,) and members_of(None) == ()


def test_each_reader_gets_its_own_hidden_states() -> None:
    first, second = Reader("first", (2, 5)), Reader("second", (5, 1))
    both = portfolio_of([Named("other", 1), first, second], name="auto")
    assert isinstance(both, TapPortfolio) and both.taps == (2, 5, 1) and both.path == "somewhere, somewhere"
    taps_RD = torch.tensor([[2.0, 2.0, 5.0, 5.0, 1.0, 1.0]])
    both.absorb(0, 3, taps_RD)
    assert first.seen[0].tolist() == [[2, 2, 5, 5]] and second.seen[0].tolist() == [[5, 5, 1, 1]]


@pytest.mark.parametrize("names", [["one"], ["one", "one"], []])
def test_a_choice_needs_two_of_different_names(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="auto"):
        Portfolio([Named(name, 0) for name in names], name="auto:x")


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


def test_by_name_with_options_of_the_members(target: LlamaTarget, tmp_path: Path) -> None:
    save_head(tmp_path / "mine", tiny_head(target), tiny_info(target))
    spec = f"auto:suffix:rule=chain,max_depth=9,ngram,{tmp_path / 'mine'}:min_prob=0.2,window=64"
    made = make_drafter(spec, target)
    assert isinstance(made, TapPortfolio) and made.name == spec
    assert [member.name for member in made.parts] == ["suffix", "ngram", str(tmp_path / "mine")]
    suffix, _, head = made.parts
    assert (suffix.rule, suffix.max_depth, head.min_prob) == ("chain", 9, 0.2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto:suffix", "two or more"),
        ("auto:suffix,suffix:rule=chain", "twice"),
        ("auto:suffix,none", "'none'"),
        ("auto:suffix,auto:ngram", "'auto:ngram'"),
        ("auto:suffix,ngram:widht=3", "unknown option 'widht'"),
        ("auto:", "empty"),
    ],
)
def test_mistakes_are_named(spec: str, message: str, target: LlamaTarget) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter(spec, target)
