"""Where one output stands in its grammar, and where it would stand behind any draft tokens.

A place is named by its *path*: the draft tokens between the last committed token and it. The matcher is moved from place
to place by taking tokens back to the common ancestor and reading on from there, so walking a tree depth-first reads
every node once, and a place's answer depends on its own ancestors alone.

::

    path ()        the committed output: what may come next?
    path (a,)      behind draft token a
    path (a, b)    behind b, whose parent is a; (a, c) is reached by taking b back

End-of-sequence tokens are never read: where the grammar may end they are allowed, and behind one nothing but another
follows. A grammar that can only end is *finished*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from outrider.sampling.grammar import Grammar

__all__ = ["End", "GrammarMatcher", "Path"]

Path: TypeAlias = tuple[int, ...]


class End(NamedTuple):
    """Why and where a grammar ends a run of tokens.

    Attributes:
        num_tokens: how many of the tokens belong to the output.
        is_broken: the grammar met a limit there, so the output is not complete.
    """

    num_tokens: int
    is_broken: bool


class GrammarMatcher:
    """One output's state.

    Args:
        grammar: what it must match.
    """

    __slots__ = ("_committed", "_dead", "_eos", "_forced", "_has_ended", "_matcher", "_open", "_walked", "grammar")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._eos = frozenset(grammar.compiler.table.eos_ids)
        self._matcher = grammar.new_matcher()
        self._committed: list[int] = []
        self._has_ended = False
        self._walked: Path = ()
        self._forced: dict[Path, Path] = {}
        self._open: dict[Path, bool] = {}
        # Places whose mask could not be computed within the limits: nothing follows them.
        self._dead: set[Path] = set()

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens belong to the output now."""
        path = tuple(tokens)
        self._stand(path)
        self._committed.extend(path)
        self._has_ended = self._has_ended or not self._eos.isdisjoint(path)
        size = len(path)
        if self._walked[:size] == path:
            self._take_back(size)
            self._walked = ()
        elif not self._has_ended:
            self._restore()
        self._forced = {place[size:]: run for place, run in self._forced.items() if place[:size] == path}
        self._open = {place[size:]: is_open for place, is_open in self._open.items() if place[:size] == path}
        self._dead = {place[size:] for place in self._dead if place[:size] == path}

    def rebuild(self, tokens: Sequence[int]) -> None:
        """Start again, with these tokens as the output so far."""
        self._committed, self._has_ended = list(tokens), not self._eos.isdisjoint(tokens)
        self._forced, self._open, self._dead = {}, {}, set()
        self._restore()

    def is_open(self, path: Path) -> bool:
        """True if anything but the end may follow; False too behind a token that the grammar forbids."""
        if not self._stand(path):
            return False
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = self._goes_on()
        return self._survived(path) and found

    def allows(self, path: Path, token: int) -> bool:
        """True if ``token`` may follow ``path``: the token's bit of the place's mask, without computing the mask."""
        if not self.is_open(path):
            return token in self._eos
        forced = self.forced(path)
        if forced:
            return token == forced[0]
        if token in self._eos:
            return bool(self._matcher.is_accepting())
        is_valid = bool(self._matcher.validate_tokens([token]) == 1)
        return self._survived(path) and is_valid

    def forced(self, path: Path) -> Path:
        """Tokens that must follow ``path``: the first is the only one that its mask allows. Often none."""
        found = self._forced.get(path)
        if found is None:
            found = tuple(self._matcher.compute_ff_tokens()) if self.is_open(path) else ()
            found = found if self._survived(path) else ()
            self._forced[path] = found
        return found

    def forced_run(self, path: Path, most: int) -> Path:
        """All that must follow ``path``, at most ``most`` tokens."""
        run: Path = ()
        while len(run) < most:
            following = self.forced(path + run)
            if not following:
                break
            run += following[:1] if not self._stand(path + run + following) else following
        return run[:most]

    def end_of(self, tokens: Path) -> End | None:
        """Where in a run of tokens behind the output the grammar ends it; ``None`` if it goes on."""
        for index, token in enumerate(tokens):
            if tokens[:index] in self._dead:
                return End(index + 1, is_broken=True)
            if token in self._eos:
                # Behind a finished text nothing but the end can be drawn; it is no part of the output.
                was_open = index == 0 or self.is_open(tokens[:index])
                return End(index + 1 if was_open else index, is_broken=False)
        # Behind a met limit the next law is all on the end, as it is without drafts.
        if self.is_open(tokens) or tokens in self._dead:
            return None
        return End(len(tokens), is_broken=False)

    def prepare(self, path: Path) -> Any | None:
        """llguidance's matcher, standing at ``path`` and ready for a mask; ``None`` where only the end may follow."""
        return self._matcher if self.is_open(path) else None

    def survived(self, path: Path) -> bool:
        """Call after a mask was computed at ``path``: False if that met a limit, and nothing but the end follows."""
        return self._survived(path)

    def _goes_on(self) -> bool:
        """Asked of the mask where the output may end: llguidance's own answer depends on how it got to a place."""
        if self._matcher.is_stopped():
            return False
        if not self._matcher.is_accepting():
            return True
        mask = int.from_bytes(self._matcher.compute_bitmask(), "little")
        for token in self._eos:
            mask &= ~(1 << token)
        return mask != 0

    def _stand(self, path: Path) -> bool:
        """Move to ``path``; False if it cannot be read to its end."""
        if self._has_ended or path in self._dead or not self._eos.isdisjoint(path):
            return False
        shared = 0
        for walked, token in zip(self._walked, path, strict=False):
            if walked != token:
                break
            shared += 1
        self._take_back(shared)
        rest = list(path[shared:])
        if rest:
            count = self._matcher.try_consume_tokens(rest)
            self._walked = path[: shared + count]
        return self._survived(path) and len(self._walked) == len(path)

    def _take_back(self, num_kept: int) -> None:
        """Forget all but the first walked tokens."""
        surplus = len(self._walked) - num_kept
        if surplus:
            self._matcher.rollback(surplus)
            self._walked = self._walked[:num_kept]

    def _survived(self, path: Path) -> bool:
        """llguidance never recovers from a met limit: start again, and remember where not to go."""
        if not self._matcher.is_error():
            return True
        self._dead.add(path)
        self.grammar.compiler.forget(self.grammar)
        self._restore()
        return False

    def _restore(self) -> None:
        self._matcher, self._walked = self.grammar.new_matcher(), ()
        self._matcher.try_consume_tokens([token for token in self._committed if token not in self._eos])
