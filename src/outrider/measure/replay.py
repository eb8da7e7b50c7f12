"""Drafters on texts that the target has already said, without decoding them again.

Where a proposal is a fixed function of the text (and of a known seed), verification is too: draw-and-compare keeps exactly
the drafts that the text goes on with. So a walk from step to step needs no target: propose, follow the text, jump::

    text       the  sea  is   calm .
    step 1      ^    a    b            b refused: commits "sea is" if a is "sea"; the next step starts at "is"

One walk serves many lengths: each has a place of its own in the text, and a drafter whose shorter drafts are the
beginnings of its longer ones is asked once where several of them stand. Texts of a group are walked together, so that a
drafter with a model of its own computes one batch.

Drafts that are drawn, and those of models whose law at a place does not depend on where drafting began, are scored by
:mod:`outrider.measure.expected`. Sampled trees are ranked with noise that nobody has written down: refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.drafters.base import Drafter, DraftRequest, LawDrafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import TreeShape
from outrider.engine.report import report_of
from outrider.errors import ConfigError
from outrider.measure.expected import FollowedText, score_drawn, score_start_free
from outrider.measure.tally import NO_COST, Mark, Scores, Tally
from outrider.measure.target_pass import ReadText
from outrider.types import NO_DRAFT, ROOT, DraftMode, Proposal, Verdict

__all__ = ["draft_mode", "matching_path", "refusal", "replay_group", "shares_lengths", "tree_shape"]


def tree_shape(drafter: Drafter) -> TreeShape | None:
    """The tree that the drafter grows from a law of its own, if it does."""
    for name in ("tree", "shape"):
        shape = getattr(drafter, name, None)
        if isinstance(shape, TreeShape):
            return shape
    return None


def draft_mode(read: ReadText, verification: str) -> DraftMode:
    """As a running sequence would ask for drafts."""
    params = read.text.params
    if params.is_greedy:
        return DraftMode.GREEDY
    return DraftMode.SHARED if params.seed is not None or verification == "compare" else DraftMode.DRAWN


def refusal(drafter: Drafter, *, is_greedy: bool, has_seed: bool, verification: str) -> str | None:
    """Why such requests cannot be replayed with this drafter; ``None`` if they can."""
    if is_greedy or has_seed:
        return None
    if tree_shape(drafter) is not None:
        return f"sampled trees of {drafter.name} are ranked with noise that the text does not tell"
    if not isinstance(drafter, LawDrafter):
        return None
    if verification == "compare":
        return f"drafts of {drafter.name} share noise that the text does not tell"
    if getattr(drafter, "min_prob", 0.0) > 0:
        return f"how many draft tokens {drafter.name} draws under min_prob depends on what it draws"
    return None


def replay_group(
    drafter: Drafter,
    reads: Sequence[ReadText],
    lengths: Sequence[int],
    *,
    keys: Iterator[int],
    verification: str = "auto",
    watched: int | None = None,
) -> list[Scores]:
    """Score some texts.

    Args:
        drafter: remembers what its kind remembers between requests; texts of one group run side by side.
        reads: what the target said of them, with the taps that the drafter wants.
        lengths: most draft tokens of a step, each an arm.
        keys: fresh ids of sequences.
        verification: as the engine's setting.
        watched: the length whose passes are wanted one by one.

    Raises:
        ConfigError: a request that cannot be replayed with this drafter; ask :func:`refusal` first.
    """
    _refuse(drafter, reads, verification)
    modes = [draft_mode(read, verification) for read in reads]
    by_law = isinstance(drafter, LawDrafter) and tree_shape(drafter) is None
    scores: dict[int, Scores] = {}
    if isinstance(drafter, LawDrafter) and by_law and drafter.is_start_free:
        for index, (read, mode) in enumerate(zip(reads, modes, strict=True)):
            scores[index] = score_start_free(drafter, read, lengths, mode=mode, key=next(keys), watched=watched)
    drawn = [i for i, mode in enumerate(modes) if by_law and mode is DraftMode.DRAWN and i not in scores]
    if drawn and isinstance(drafter, LawDrafter):
        found = score_drawn(drafter, [reads[index] for index in drawn], lengths, keys=keys)
        scores |= dict(zip(drawn, found, strict=True))
    walked = [index for index in range(len(reads)) if index not in scores]
    walks = [_Walk(drafter, reads[i], mode=modes[i], key=next(keys), lengths=lengths, watched=watched) for i in walked]
    _walk_all(drafter, walks)
    scores |= {index: walk.scores() for index, walk in zip(walked, walks, strict=True)}
    return [scores[index] for index in range(len(reads))]


def _refuse(drafter: Drafter, reads: Sequence[ReadText], verification: str) -> None:
    for read in reads:
        params = read.text.params
        has_seed = params.seed is not None
        reason = refusal(drafter, is_greedy=params.is_greedy, has_seed=has_seed, verification=verification)
        if reason is not None:
            raise ConfigError(f"request {read.text.id!r} cannot be replayed: {reason}; give --live, or --seed")


class _Walk:
    """One text under one drafter: each length has its own place in it."""

    def __init__(
        self,
        drafter: Drafter,
        read: ReadText,
        *,
        mode: DraftMode,
        key: int,
        lengths: Sequence[int],
        watched: int | None,
    ) -> None:
        self.text = FollowedText(drafter, read, key)
        self.output = read.text.output
        self._mode = mode
        self._limit = read.text.limit
        self._starts = dict.fromkeys(lengths, 1)
        self._tallies = {k: Tally() for k in lengths}
        self._marks: list[Mark] = []
        self._watched = watched
        self.here = 1

    @property
    def is_done(self) -> bool:
        """True once every length has come to the end."""
        return self.here >= len(self.output)

    def wishes(self) -> dict[int, list[int]]:
        """Go to the nearest place where a length stands; the lengths there, by how many drafts they may have."""
        self.text.advance(self.here)
        budgets: dict[int, list[int]] = {}
        for k, start in self._starts.items():
            if start == self.here:
                budgets.setdefault(max(0, min(k, self._limit - start - 1)), []).append(k)
        return budgets

    def request(self, num_draft_tokens: int) -> DraftRequest:
        """A wish for drafts behind this place."""
        return self.text.request(num_draft_tokens, self._mode)

    def judge(self, proposal: Proposal, lengths: Sequence[int]) -> None:
        """These lengths were proposed this: see how far the text goes along, and move them on."""
        path = matching_path(proposal, self.output, self.here)
        if proposal.is_chain:
            self._count_chain(proposal.tokens, len(proposal), len(path), lengths)
            return
        committed = self._num_committed(len(path))
        tokens = self.output[self.here : self.here + committed]
        report = report_of(proposal, Verdict(path=path, next_token=tokens[-1]), tokens, NO_COST)
        for k in lengths:
            self._tallies[k].add(report)
        self._move(lengths, Mark(self.here, len(path), committed, report.refused))

    def judge_beginnings(self, proposal: Proposal, budgets: dict[int, list[int]]) -> None:
        """The lengths of each budget were proposed the first so many tokens of this."""
        if proposal.is_chain:
            num_matching = len(matching_path(proposal, self.output, self.here))
            for budget, lengths in budgets.items():
                self._count_chain(proposal.tokens, min(budget, len(proposal)), num_matching, lengths)
            return
        for budget, lengths in budgets.items():
            self.judge(proposal.truncate(budget), lengths)

    def _count_chain(self, tokens: Sequence[int], num_drafted: int, num_matching: int, lengths: Sequence[int]) -> None:
        kept = min(num_matching, num_drafted)
        committed = self._num_committed(kept)
        for k in lengths:
            self._tallies[k].add_chain(num_drafted, kept, committed)
        is_refused = kept < min(committed, num_drafted)
        self._move(lengths, Mark(self.here, kept, committed, tuple(tokens[kept : kept + 1]) if is_refused else ()))

    def _num_committed(self, num_kept: int) -> int:
        """Behind a stop nothing is committed, no bonus token either."""
        return min(num_kept + 1, len(self.output) - self.here)

    def _move(self, lengths: Sequence[int], mark: Mark) -> None:
        if self._watched in lengths:
            self._marks.append(mark)
        self._starts.update(dict.fromkeys(lengths, self.here + mark.num_committed))

    def move(self) -> None:
        """To the next place where a length stands."""
        self.here = min(self._starts.values())

    def scores(self) -> Scores:
        """What came out."""
        counts = {k: tally.counts() for k, tally in self._tallies.items()}
        return Scores(counts=counts, marks=tuple(self._marks))


def matching_path(proposal: Proposal, output: Sequence[int], start: int) -> tuple[int, ...]:
    """Nodes that the text goes on with, from the root; of siblings that carry one token the first, as verification has it."""
    if proposal.is_chain:
        depth = 0
        for token, said in zip(proposal.tokens, output[start : start + len(proposal)], strict=False):
            if token != said:
                break
            depth += 1
        return tuple(range(depth))
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    node = ROOT
    for said in output[start:]:
        found = children.get((node, said))
        if found is None:
            break
        node = found
        path.append(node)
    return tuple(path)


def _walk_all(drafter: Drafter, walks: Sequence[_Walk]) -> None:
    """Walk texts side by side. A text that is at its end is finished at once: others may draft from what it said."""
    going = list(walks)
    while going:
        for walk in [walk for walk in going if walk.is_done]:
            walk.text.finish()
        going = [walk for walk in going if not walk.is_done]
        wishes = [walk.wishes() for walk in going]
        if shares_lengths(drafter):
            _propose_longest(drafter, going, wishes)
        else:
            _propose_each(drafter, going, wishes)
        for walk in going:
            walk.move()


def shares_lengths(drafter: Drafter) -> bool:
    """True for drafters whose proposal of k draft tokens is the beginning of their longer ones.

    A drafter that is not named here is asked once for each length, which is as right and takes longer.
    """
    if isinstance(drafter, SuffixDrafter):
        return drafter.rule != "paper"
    return isinstance(drafter, NGramDrafter) or (
        isinstance(drafter, EagleDrafter | LMDrafter) and tree_shape(drafter) is None
    )


def _propose_longest(drafter: Drafter, walks: Sequence[_Walk], wishes: Sequence[dict[int, list[int]]]) -> None:
    longest = [max(budgets) for budgets in wishes]
    proposals = _ask(drafter, walks, longest)
    for walk, budgets, proposal in zip(walks, wishes, proposals, strict=True):
        walk.judge_beginnings(proposal, budgets)


def _propose_each(drafter: Drafter, walks: Sequence[_Walk], wishes: Sequence[dict[int, list[int]]]) -> None:
    for turn in range(max(map(len, wishes), default=0)):
        pairs = [(walk, list(each.items())[turn]) for walk, each in zip(walks, wishes, strict=True) if turn < len(each)]
        proposals = _ask(drafter, [walk for walk, _ in pairs], [budget for _, (budget, _) in pairs])
        for (walk, (_, lengths)), proposal in zip(pairs, proposals, strict=True):
            walk.judge(proposal, lengths)


def _ask(drafter: Drafter, walks: Sequence[_Walk], budgets: Sequence[int]) -> list[Proposal]:
    """One proposal each; nobody is asked where nothing may be drafted."""
    asked = [index for index, budget in enumerate(budgets) if budget > 0]
    proposals = [NO_DRAFT] * len(walks)
    if asked:
        found = drafter.propose([walks[index].request(budgets[index]) for index in asked])
        for index, proposal in zip(asked, found, strict=True):
            if proposal.draft_probs_NV is not None:
                raise ConfigError(
                    f"{drafter.name} draws its drafts and cannot tell their law along a text, so sampled requests "
                    "cannot be replayed with it; give --live, or --seed"
                )
            proposals[index] = proposal
    return proposals
