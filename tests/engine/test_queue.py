"""Who is next: in order within a scope, scopes in turn, urgent ones earlier, and nobody never."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.queue import PATIENCE, FairQueue, Ticket
from outrider.engine.request import build_sequences
from outrider.engine.sequence import Request
from outrider.sampling.params import SamplingParams
from tests.engine.support import table_model

SPEC = table_model().spec


def ticket(number: int, scope: str | None = None, priority: int = 0) -> Ticket:
    request = Request(
        id=str(number), prompt=(1,), params=SamplingParams(), seed=0, scope=scope, priority=priority, number=number
    )
    return Ticket(sequences=build_sequences(request, keys=itertools.count(number), spec=SPEC, tokenizer=None))


def drawn_off(queue: FairQueue) -> list[int]:
    order = []
    while (first := queue.peek()) is not None:
        queue.take(first)
        order.append(first.request.number)
    assert len(queue) == 0
    return order


def queue_of(*tickets: Ticket) -> FairQueue:
    queue = FairQueue()
    for each in tickets:
        queue.push(each)
    return queue


def test_first_come_first_served() -> None:
    assert drawn_off(queue_of(*(ticket(number) for number in range(5)))) == [0, 1, 2, 3, 4]


def test_scopes_take_turns_however_many_requests_one_of_them_has() -> None:
    greedy = [ticket(number, "greedy") for number in range(6)]
    assert drawn_off(queue_of(*greedy, ticket(6, "modest"), ticket(7, "modest"))) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_the_urgent_go_first() -> None:
    assert drawn_off(queue_of(ticket(0, priority=5), ticket(1), ticket(2, priority=-1), ticket(3))) == [2, 1, 3, 0]


def test_the_patient_are_not_starved_by_the_urgent() -> None:
    queue = queue_of(ticket(0, priority=1))
    order: list[int] = []
    for number in range(1, PATIENCE + 2):
        queue.push(ticket(number, priority=0))
        first = queue.peek()
        assert first is not None
        queue.take(first)
        order.append(first.request.number)
    assert order == [*range(1, PATIENCE + 1), 0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 2), st.booleans()), min_size=1, max_size=40
    )
)
def test_everybody_comes_out_once_and_in_order_within_scope_and_priority(
    arrivals: list[tuple[str | None, int, bool]],
) -> None:
    queue, order = FairQueue(), []
    kinds = {}
    for number, (scope, priority, takes) in enumerate(arrivals):
        queue.push(ticket(number, scope, priority))
        kinds[number] = scope, priority
        if takes and (first := queue.peek()) is not None:
            queue.take(first)
            order.append(first.request.number)
    order += drawn_off(queue)
    assert sorted(order) == list(range(len(arrivals)))
    for kind in set(kinds.values()):
        alike = [number for number in order if kinds[number] == kind]
        assert alike == sorted(alike)
