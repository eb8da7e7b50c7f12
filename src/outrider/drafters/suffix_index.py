"""An online suffix automaton with occurrence counts: every substring of the texts it was given, in linear memory.

A depth-limited suffix tree spends up to ``depth`` nodes on each token of a repeated passage, and repeated passages are
what a drafter lives on. The automaton (Blumer et al., 1985) holds the same information in at most two nodes a token. Each
node stands for all substrings that end at the same places: suffixes of one another, of ``len(link) + 1`` to ``len``
tokens. Following suffix links from the node of a whole text walks through its suffixes from long to short.

Counts are exact for all substrings of up to ``depth`` tokens, after additions and after removals. A node that stands only
for longer ones carries no meaningful count; :meth:`SuffixIndex.shorten` keeps readers away from those.

Removal needs two things besides counts. ``holders`` counts who keeps a node alive: nodes whose suffix link points at it,
and texts of which it stands for a prefix. ``source`` is the node that the longest substring, less its last token, belongs
to: transitions into a node leave from there and from its suffix links, so that they can be unhooked without a search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["RANK_UNIT", "START", "WIDEST", "SuffixIndex"]

START = 0
"""The node of the empty string."""

RANK_UNIT = 1 << 40

WIDEST = 8
"""Successors of a node that are ever told of."""

_NOWHERE = -1


class SuffixIndex:
    """Counts of all substrings of up to ``depth`` tokens in a queue of texts, the last of which is still growing.

    Nodes are integers. The public lists are indexed by node and are for reading only; plain lists, because the drafter
    reads them a hundred times a proposal.

    Attributes:
        next: child node by token.
        token: the token that a node's substrings end with.
        rank: occurrences of a node's substrings, times ``RANK_UNIT``, plus the time of the latest of them: the more
            frequent node ranks higher, of equally frequent ones the one seen last.
        length: tokens of a node's longest substring.
        link: node of the longest suffix that the node does not stand for itself.
    """

    def __init__(self, depth: int) -> None:
        assert depth >= 2, depth
        self.depth = depth
        self.next: list[dict[int, int]] = [{}]
        self.token = [_NOWHERE]
        self.rank = [0]
        self.length = [0]
        self.link = [_NOWHERE]
        self._source = [_NOWHERE]
        self._holders = [1]
        self._unused: list[int] = []
        self._texts: deque[tuple[int, ...]] = deque()
        self._successors: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # of wide nodes, until the next change
        self._clock = 0
        self._last = START  # node of the whole growing text
        self._window = START  # node of its last `_reach` tokens, _reach = min(depth, its tokens)
        self._reach = 0

    @property
    def num_nodes(self) -> int:
        """Nodes in use, the start among them."""
        return len(self.next) - len(self._unused)

    @property
    def num_texts(self) -> int:
        """Texts that were ended and not removed."""
        return len(self._texts)

    @property
    def end(self) -> tuple[int, int]:
        """Node of the longest suffix of the growing text that can have a counted successor, and its tokens."""
        node, reach = self._window, min(self._reach, self.depth - 1)
        return self.shorten(node, reach), reach

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens to the growing text."""
        self._successors.clear()
        for token in tokens:
            self._last = self._extend(self._last, token)
            self._holders[self._last] += 1
            self._clock += 1
            self._window, self._reach = self._slide(self._window, self._reach, token)
            self._count_up(self._window)

    def end_text(self, tokens: Sequence[int]) -> None:
        """Close the growing text, which was ``tokens``, and begin an empty one."""
        self._texts.append(tuple(tokens))
        self._last, self._window, self._reach = START, START, 0

    def remove_oldest(self) -> None:
        """Forget the text that was ended first; the growing text must be empty."""
        assert self._last == START
        self._successors.clear()
        tokens = self._texts.popleft()
        prefixes = []
        last, window, reach = START, START, 0
        for token in tokens:
            last = self.next[last][token]
            prefixes.append(last)
            window, reach = self._slide(window, reach, token)
            self._count_down(window)
        for node in reversed(prefixes):
            self._release(node)

    def advance(self, node: int, matched: int, token: int) -> tuple[int, int]:
        """From the longest known suffix of a text (its node and tokens) to that of the text and one more token."""
        child = self.next[node].get(token)
        while child is None:
            if node == START:
                return START, 0
            node = self.link[node]
            matched = self.length[node]
            child = self.next[node].get(token)
        matched = min(matched + 1, self.depth - 1)
        return self.shorten(child, matched), matched

    def shorten(self, node: int, matched: int) -> int:
        """The node on ``node``'s suffix links that stands for the suffix of ``matched`` tokens."""
        while self.length[self.link[node]] >= matched and node != START:
            node = self.link[node]
        return node

    def back_off(self, node: int, matched: int) -> tuple[int, int]:
        """The longest suffix of a node's substring of ``matched`` tokens that something follows; else the start."""
        while not self.next[node] and node != START:
            node = self.link[node]
            matched = self.length[node]
        return node, matched

    def successors(self, node: int) -> tuple[int, list[tuple[int, int]]]:
        """Occurrences of all successors of a node together, and the ``WIDEST`` highest ranking with their counts."""
        known = self._successors.get(node)
        if known is not None:
            return known
        rank, token = self.rank, self.token
        children = self.next[node].values()
        if len(children) == 1:
            [child] = children
            count = rank[child] // RANK_UNIT
            return count, [(token[child], count)]
        total = sum([rank[child] // RANK_UNIT for child in children])
        best = sorted(children, key=rank.__getitem__, reverse=True)[:WIDEST]
        found = total, [(token[child], rank[child] // RANK_UNIT) for child in best]
        if len(children) > WIDEST:
            self._successors[node] = found
        return found

    def _slide(self, window: int, reach: int, token: int) -> tuple[int, int]:
        # Extending the text may have split the window's node, and its shorter part is the one meant.
        window = self.next[self.shorten(window, reach)][token]
        reach = min(reach + 1, self.depth)
        return self.shorten(window, reach), reach

    def _count_up(self, node: int) -> None:
        rank, link, clock = self.rank, self.link, self._clock
        while node != START:
            rank[node] = (rank[node] | RANK_UNIT - 1) + 1 + clock  # one more occurrence, the latest one now
            node = link[node]

    def _count_down(self, node: int) -> None:
        rank, link = self.rank, self.link
        while node != START:
            rank[node] -= RANK_UNIT
            node = link[node]

    def _extend(self, node: int, token: int) -> int:
        child = self.next[node].get(token)
        if child is not None:
            return child if self.length[child] == self.length[node] + 1 else self._split(node, token)
        created = self._create(token, self.length[node] + 1, node)
        while node != _NOWHERE and token not in self.next[node]:
            self.next[node][token] = created
            node = self.link[node]
        if node == _NOWHERE:
            link = START
        else:
            link = self.next[node][token]
            if self.length[link] != self.length[node] + 1:
                link = self._split(node, token)
        self.link[created] = link
        self._holders[link] += 1
        return created

    def _split(self, node: int, token: int) -> int:
        """Give the substrings of ``node``'s child that are no longer than ``node``'s own plus one a node to themselves."""
        child = self.next[node][token]
        created = self._create(token, self.length[node] + 1, node)
        self.next[created] = self.next[child].copy()
        self.rank[created] = self.rank[child]
        self.link[created] = self.link[child]  # takes the child's place among the holders of that link
        self.link[child] = created
        self._holders[created] = 1
        while node != _NOWHERE and self.next[node].get(token) == child:
            self.next[node][token] = created
            node = self.link[node]
        return created

    def _create(self, token: int, length: int, source: int) -> int:
        if self._unused:
            node = self._unused.pop()
            self.token[node], self.length[node], self._source[node] = token, length, source
            return node
        self.next.append({})
        self.token.append(token)
        self.rank.append(0)
        self.length.append(length)
        self.link.append(START)
        self._source.append(source)
        self._holders.append(0)
        return len(self.next) - 1

    def _release(self, node: int) -> None:
        """One holder of ``node`` is gone; nodes that nobody holds go too, links after them."""
        self._holders[node] -= 1
        while self._holders[node] == 0:
            link = self.link[node]
            self._unhook(node)
            self.next[node] = {}
            self.rank[node] = 0
            self._unused.append(node)
            self._holders[link] -= 1
            node = link

    def _unhook(self, node: int) -> None:
        token, source = self.token[node], self._source[node]
        while source != _NOWHERE and self.next[source].get(token) == node:
            del self.next[source][token]
            source = self.link[source]
