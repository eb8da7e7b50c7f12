"""The dense cache against a list per slot: content, lengths, moves between rows and buckets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from outrider.cache.dense import SMALLEST_BUCKET, DenseCache

L, N, G, C = 2, 3, 2, 4


@dataclass(frozen=True)
class Rows:
    """What the cache needs to know of a sequence's rows in a pass."""

    slot: int
    start: int
    num_rows: int
    parents: tuple[int, ...] | None = None


@dataclass
class Writer:
    """Appends rows whose content names the layer and the token."""

    cache: DenseCache
    written: int = 0
    expected: dict[int, list[int]] = field(default_factory=dict)

    @torch.inference_mode()
    def append(self, counts: dict[int, int]) -> None:
        """One pass that brings ``counts[slot]`` rows to each slot."""
        segments, tokens = [], []
        for slot, count in counts.items():
            segments.append(Rows(slot=slot, start=len(tokens), num_rows=count))
            new = list(range(self.written, self.written + count))
            self.written += count
            tokens += new
            self.expected[slot] += new
        attention = self.cache.begin(segments, num_groups=N)
        for layer in range(L):
            attention.attend(layer, _content(layer, tokens))
        self.cache.advance(segments)

    def check(self, slot: int) -> None:
        tokens = self.expected[slot]
        assert self.cache.length(slot) == len(tokens)
        got = self.cache.read(slot)
        for layer in range(L):
            # [T, N + 2, G, C] -> keys and values [2, G, T, C]
            expected = _content(layer, tokens)[:, N:].permute(1, 2, 0, 3)
            assert torch.equal(got[layer], expected), (slot, layer)


def _content(layer: int, tokens: list[int]) -> Tensor:
    """Rows ``[T, N + 2, G, C]`` whose every number is unlike all others."""
    marks = torch.arange((N + 2) * G * C, dtype=torch.float32).view(1, N + 2, G, C) / 128
    return torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1, 1) + marks + 100_000 * layer


def new_cache() -> DenseCache:
    return DenseCache(num_layers=L, num_kv_heads=G, head_width=C, dtype=torch.float32, device=torch.device("cpu"))


def new_writer(num_slots: int, num_tokens: int = 1) -> tuple[Writer, list[int]]:
    writer = Writer(new_cache())
    slots = [writer.cache.allocate(num_tokens) for _ in range(num_slots)]
    writer.expected = {slot: [] for slot in slots}
    return writer, slots


class CacheMachine(RuleBasedStateMachine):
    """Random passes, verdicts, prefix copies, arrivals and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, _ = new_writer(0)

    @rule(num_tokens=st.sampled_from([1, 256, 257, 600]))
    def allocate(self, num_tokens: int) -> None:
        slot = self.writer.cache.allocate(num_tokens)
        assert slot not in self.writer.expected
        self.writer.expected[slot] = []

    @precondition(lambda self: self.writer.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writer.expected)))
        self.writer.cache.free(slot)
        del self.writer.expected[slot]

    @precondition(lambda self: self.writer.expected)
    @rule(data=st.data())
    def one_pass(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.writer.expected)), min_size=1, unique=True))
        size = st.sampled_from([1, 1, 2, 5, 40, 200])
        self.writer.append({slot: data.draw(size) for slot in slots})

    @precondition(lambda self: any(self.writer.expected.values()))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, held in self.writer.expected.items() if held]))
        held = self.writer.expected[slot]
        base = data.draw(st.integers(max(0, len(held) - 12), len(held)))
        rows = range(len(held) - base)
        path = sorted(data.draw(st.sets(st.sampled_from(rows)))) if rows else []
        self.writer.cache.keep(slot, base=base, path=path)
        self.writer.expected[slot] = held[:base] + [held[base + row] for row in path]

    @precondition(lambda self: self.writer.expected)
    @rule(data=st.data(), room=st.sampled_from([1, 300]))
    def copy_prefix(self, data: st.DataObject, room: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.writer.expected)))
        held = self.writer.expected[source]
        count = data.draw(st.integers(0, len(held)))
        target = self.writer.cache.allocate(room)
        self.writer.cache.copy_prefix(source, target, count)
        self.writer.expected[target] = held[:count]

    @invariant()
    def content_is_that_of_the_lists(self) -> None:
        for slot in self.writer.expected:
            self.writer.check(slot)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)


def test_the_worked_example_of_keep() -> None:
    writer, (slot,) = new_writer(1)
    writer.append({slot: 5})
    writer.append({slot: 4})
    writer.cache.keep(slot, base=5, path=(0, 1))
    assert writer.cache.length(slot) == 7
    writer.expected[slot] = writer.expected[slot][:7]
    writer.check(slot)


def test_keep_moves_the_rows_of_a_tree_path() -> None:
    writer, (other, slot) = new_writer(2)
    writer.append({other: 3, slot: 9})
    writer.cache.keep(slot, base=2, path=(0, 3, 6))
    held = writer.expected[slot]
    writer.expected[slot] = [*held[:2], held[2], held[5], held[8]]
    writer.check(slot)
    writer.check(other)


def test_an_empty_path_truncates() -> None:
    writer, (slot,) = new_writer(1)
    writer.append({slot: 8})
    writer.cache.keep(slot, base=3, path=())
    writer.expected[slot] = writer.expected[slot][:3]
    writer.append({slot: 2})
    writer.check(slot)


@pytest.mark.parametrize(("base", "path"), [(9, ()), (4, (1, 1)), (4, (2, 1)), (4, (0, 4)), (4, (-1,))])
def test_keep_refuses_what_is_not_cached(base: int, path: tuple[int, ...]) -> None:
    writer, (slot,) = new_writer(1)
    writer.append({slot: 8})
    with pytest.raises(AssertionError):
        writer.cache.keep(slot, base=base, path=path)


@pytest.mark.parametrize("room", [1, 300])
def test_a_copied_prefix_is_the_source_and_its_own(room: int) -> None:
    """Both grow on without seeing each other; a copy may be longer than the bucket that it was given."""
    writer, (source,) = new_writer(1)
    writer.append({source: SMALLEST_BUCKET + 5})
    for count in (0, 1, 7, SMALLEST_BUCKET + 5):
        target = writer.cache.allocate(room)
        writer.cache.copy_prefix(source, target, count)
        writer.expected[target] = writer.expected[source][:count]
        writer.check(target)
        writer.append({source: 1, target: 2})
    for slot in writer.expected:
        writer.check(slot)


def test_outgrowing_a_bucket_moves_one_sequence_and_not_its_neighbours() -> None:
    writer, slots = new_writer(3)
    writer.append(dict.fromkeys(slots, SMALLEST_BUCKET - 1))
    writer.append({slots[0]: 2, slots[2]: 1})
    writer.append({slots[0]: SMALLEST_BUCKET + 7, slots[1]: 1})
    for slot in slots:
        writer.check(slot)


def test_growing_and_freeing_leave_the_others_alone() -> None:
    writer, slots = new_writer(9)
    for count, slot in enumerate(slots, start=1):
        writer.append({slot: count})
    for slot in (slots[0], slots[8], slots[4], slots[3]):
        writer.cache.free(slot)
        del writer.expected[slot]
        for rest in writer.expected:
            writer.check(rest)


def test_memory_is_given_back() -> None:
    writer, slots = new_writer(16, num_tokens=300)
    full = writer.cache.num_bytes()
    for slot in slots[2:]:
        writer.cache.free(slot)
    assert writer.cache.num_bytes() <= full // 4
    for slot in slots[:2]:
        writer.cache.free(slot)
    assert writer.cache.num_bytes() == 0


def test_slots_are_reused_lowest_first() -> None:
    cache = new_cache()
    slots = [cache.allocate(1) for _ in range(4)]
    assert slots == [0, 1, 2, 3]
    cache.free(2)
    cache.free(1)
    assert [cache.allocate(1) for _ in range(3)] == [1, 2, 4]
    assert cache.length(1) == 0
