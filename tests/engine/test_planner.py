"""The planner drafts where it pays, stops where it does not, and comes back when the text changes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from outrider.engine.beliefs import Belief, Own
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, RowCosts
from outrider.engine.idle import HOPELESS_SHARE, LAPSE, TRY_SHARE, USE, WARM, Listeners, Use
from outrider.engine.plan import Plannable, StepPlan
from outrider.engine.planner import NAP, Planner
from outrider.engine.speculation import SpeculationParams
from outrider.types import NO_DRAFT, Proposal, StepReport
from tests.engine.simulation import (
    CURVE,
    HEAD,
    TABLE,
    FakeLookup,
    FakeModel,
    Running,
    best_fixed,
    fixed_speed,
    make_planner,
    simulate,
    step,
)

BATCHES = (1, 2, 4, 8, 16, 32)


def steps_for(batch: int) -> int:
    return max(200, 1600 // batch)


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.6, 0.75, 0.9])
def test_never_far_from_the_best_fixed_length(chance: float) -> None:
    """Over batches of 1 to 32: at most 3 % behind whoever knew the best k (0 among them) beforehand."""
    lost = {}
    for batch in BATCHES:
        found = simulate(make_planner(), batch=batch, steps=steps_for(batch), chance=lambda now, row: chance)
        lost[batch] = 1 - found.speed / best_fixed(batch, chance)
    assert max(lost.values()) <= 0.03, lost


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_useless_drafter_costs_next_to_nothing(batch: int) -> None:
    planner = make_planner()
    found = simulate(planner, batch=batch, steps=steps_for(batch), chance=lambda now, row: 0.01)
    assert found.speed >= 0.97 * fixed_speed(batch, 0, 0.0)
    assert planner.log.counters.tries > 0, "it must be tried now and then"


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_no_table_knows_of_drafts_does_not_make_plain_steps_look_slow(batch: int) -> None:
    """Every step with drafts takes 1.6 times what the table says; where that makes drafting lose, it ends soon."""

    def truth(now: int, rows: int, batch: int) -> float:
        return CURVE(rows) * (1.6 if rows > batch else 1.0)

    chance = 0.45
    found = simulate(make_planner(), batch=batch, steps=1500, chance=lambda now, row: chance, truth=truth)
    tokens = [batch * sum(chance**i for i in range(k + 1)) for k in range(9)]
    speeds = [
        each / (truth(0, batch * (1 + k), batch) + (HEAD(batch, k) if k else 0.0)) for k, each in enumerate(tokens)
    ]
    assert speeds[0] == max(speeds), "plain decoding is best here"
    assert found.speed >= 0.97 * speeds[0]


@pytest.mark.parametrize("chance", [0.3, 0.8])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_noisy_machine_whose_speed_changes_costs_little(batch: int, chance: float) -> None:
    """Passes take up to half as long again by chance, one in twenty three times as long, and twice as long in between."""

    def speed(planner: Planner) -> float:
        rng = random.Random(3)

        def truth(now: int, rows: int, batch: int) -> float:
            spike = 3.0 if rng.random() < 0.05 else 1.0
            return CURVE(rows) * (2.0 if 700 <= now < 1400 else 1.0) * (1 + 0.5 * rng.random()) * spike

        return simulate(planner, batch=batch, steps=2000, chance=lambda now, row: chance, truth=truth).speed

    best = max(speed(make_planner(k=k, schedule="fixed")) for k in (0, 1, 2, 4, 8))
    assert speed(make_planner()) >= 0.92 * best


def test_a_long_run_of_drafts_is_broken_now_and_then_and_the_seldomer_the_more_it_gains() -> None:
    plain = {}
    for chance in (0.5, 0.95):
        found = simulate(make_planner(), batch=1, steps=2000, chance=lambda now, row, p=chance: p, length=5000)
        plain[chance] = sum(not any(depths) for depths in found.depths[500:])
    assert 0 < plain[0.95] < plain[0.5] < 60


@pytest.mark.parametrize("batch", [1, 8])
def test_a_change_of_the_text_is_followed(batch: int) -> None:
    """Good for 400 steps, bad for 400, good again: within 3 % of knowing when, once a change is sixty steps old."""

    def chance(now: int, row: int) -> float:
        return 0.85 if now < 400 or now >= 800 else 0.02

    found = simulate(make_planner(), batch=batch, steps=1200, chance=chance, length=5000)
    for first, last, drafts in ((60, 400, True), (460, 800, False), (860, 1200, True)):
        asked = [depths for depths in found.depths[first:last] if any(depths)]
        share = len(asked) / (last - first)
        assert share > 0.95 if drafts else share < 0.2, (first, last, share)


def test_each_sequence_of_a_batch_gets_what_its_own_text_is_worth() -> None:
    found = simulate(make_planner(), batch=8, steps=400, chance=lambda now, row: 0.9 if row < 4 else 0.02, length=5000)
    late = found.depths[100:]
    good, bad = (sum(sum(depths[part]) for depths in late) / len(late) / 4 for part in (slice(4), slice(4, 8)))
    assert good > 2.5 and bad < 0.3


def test_more_load_means_shorter_drafts() -> None:
    lengths = []
    for batch in (1, 8, 32):
        found = simulate(make_planner(), batch=batch, steps=300, chance=lambda now, row: 0.7)
        lengths.append(sum(map(sum, found.depths)) / batch / 300)
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[2] < 0.3, "at 32 sequences a draft of 0.7 does not pay for its row here"


def test_tries_cost_no_more_than_their_share() -> None:
    planner = make_planner()
    found = simulate(planner, batch=4, steps=2000, chance=lambda now, row: 0.0, length=5000)
    plain = 2000 * CURVE(4)
    learned = 12 * (HEAD(4, 8) + CURVE(36) - CURVE(4)) + 2 * CURVE(4)  # the first steps, when nothing was known
    assert found.ms - plain <= 1.1 * TRY_SHARE * plain + learned


def test_a_card_that_promises_nothing_is_believed_until_evidence_comes() -> None:
    sequences = [Running()]
    pessimist, optimist = make_planner(card=(0.02,)), make_planner(card=(0.9, 0.9))
    for planner, drafts in ((pessimist, False), (optimist, True)):
        planner._purse.ms = 0.0
        plan = planner.open(sequences)
        assert bool(planner.ask_models(plan, sequences, [NO_DRAFT])) == drafts


# --- limits and wishes


def asked(planner: Planner, *sequences: Running) -> list[int]:
    plan = planner.open(sequences)
    asks = planner.ask_models(plan, sequences, [NO_DRAFT] * len(sequences)) or plan.asks
    return [ask.depth for ask in asks]


def test_fixed_schedule_never_changes() -> None:
    found = simulate(make_planner(k=5, schedule="fixed"), batch=2, steps=50, chance=lambda now, row: 0.0)
    assert all(depths == [5, 5] for depths in found.depths)


def test_zero_draft_tokens_never_drafts() -> None:
    found = simulate(make_planner(k=0), batch=2, steps=50, chance=lambda now, row: 1.0)
    assert all(depths == [0, 0] for depths in found.depths)


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_the_end_of_the_output_bounds_the_depth(schedule: str) -> None:
    planner = make_planner(schedule=schedule, card=(0.99,))
    assert asked(planner, Running(most_drafts=3)) == [3]
    assert asked(planner, Running(key=1, most_drafts=0)) == [0]
    assert asked(planner, Running(key=2, most_drafts=-1)) == [0]


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_a_request_may_ask_for_less_or_for_nothing(schedule: str) -> None:
    planner = make_planner(schedule=schedule, card=(0.99,))
    wishes = [SpeculationParams(num_draft_tokens=2), SpeculationParams(enabled=False), SpeculationParams()]
    sequences = [Running(key=key, speculation=wish) for key, wish in enumerate(wishes)]
    assert asked(planner, *sequences) == [2, 0, 8]
    assert [planner.wants_taps(sequence) for sequence in sequences] == [False] * 3, "this drafter reads none"


def test_a_request_may_name_its_drafter() -> None:
    members = [FakeModel("one"), FakeModel("two")]
    table = CostTable(passes=CURVE, drafts={"one": HEAD, "two": HEAD})
    for schedule in ("adaptive", "fixed"):
        config = EngineConfig.from_dict({"schedule": schedule})
        planner = Planner(config, table, members)  # type: ignore[arg-type]
        sequences = [
            Running(key=key, speculation=SpeculationParams(drafter=name)) for key, name in enumerate(("two", "one"))
        ]
        plan = planner.open(sequences)
        asks = planner.ask_models(plan, sequences, [NO_DRAFT] * 2) or plan.asks
        assert [ask.drafter for ask in asks] == ["two", "one"]


def test_trees_are_asked_no_deeper_than_they_grow() -> None:
    member = FakeModel(levels=3, deepest=3, nodes_per_level=2.0, card_rates=(0.99,))
    planner = Planner(EngineConfig(), TABLE, [member])  # type: ignore[list-item]
    assert asked(planner, Running()) == [3]


def test_copies_that_go_on_where_a_tree_ends_cost_no_more_rows() -> None:
    table = CostTable(passes=CURVE, drafts={"head": DraftCosts(level=1.0)})
    deep, shallow = (FakeModel(levels=levels, nodes_per_level=5.0, card_rates=(0.6,)) for levels in (100, 2))
    found = []
    for member in (deep, shallow):
        planner = Planner(EngineConfig(), table, [member])  # type: ignore[list-item]
        plan = planner.open([Running()])
        [ask] = planner.ask_models(plan, [Running()], [NO_DRAFT])
        found.append((ask.depth, plan.num_rows))
    assert found[0][0] < 4
    assert found[1] == (8, 1 + 2 * 5.0)


@pytest.mark.parametrize(("levels", "depth"), [(100, 1), (1, 3)])
def test_a_try_is_priced_by_the_levels_that_run(levels: int, depth: int) -> None:
    member = FakeModel(levels=levels, card_rates=(0.05,))
    assert asked(Planner(EngineConfig(), TABLE, [member]), Running()) == [depth]  # type: ignore[list-item]


def test_forgotten_sequences_leave_nothing() -> None:
    planner = make_planner()
    simulate(planner, batch=2, steps=10, chance=lambda now, row: 0.5)
    for key in (0, 1):
        planner.forget(Running(key=key))
    assert not planner.evidence._own


def test_prompts_read_in_the_same_pass_leave_less_room() -> None:
    planner = make_planner(card=(0.7,))
    depths = []
    for rows in (0, 200):
        plan = planner.open([Running()], num_other_rows=rows)
        assert plan.plain_ms + plan.other_ms == pytest.approx(CURVE(1 + rows))
        depths.append(sum(ask.depth for ask in planner.ask_models(plan, [Running()], [NO_DRAFT])))
    assert depths[0] >= depths[1] > 0


def test_a_pass_without_sequences_is_no_step() -> None:
    planner = make_planner()
    plan = planner.open([], num_other_rows=512)
    assert planner.ask_models(plan, [], []) == [] == planner.prune(plan, [], [])
    planner.learn(plan, [], [], [])
    assert planner.log.counters.steps == 0


# --- lookups, and the choice among drafters


def mixed() -> Planner:
    table = CostTable(passes=CURVE, drafts={"head": HEAD, "lookup": DraftCosts(sequence=0.05)})
    return Planner(EngineConfig(), table, [FakeLookup(), FakeModel()])  # type: ignore[list-item]


def copied(*chances: float) -> Proposal:
    """A chain of candidates that the lookup trusts so far."""
    scores, total = [], 0.0
    for chance in chances:
        total += math.log(chance)
        scores.append(total)
    return Proposal(
        tokens=tuple(range(len(chances))),
        parents=tuple(range(-1, len(chances) - 1)),
        drafter="lookup",
        scores=tuple(scores),
    )


def decide(planner: Planner, sequence: Running, find: Proposal) -> str:
    """Whose draft is verified when the lookup finds this."""
    plan = planner.open([sequence])
    found = [find if plan.asks[0].depth else NO_DRAFT]
    asks = planner.ask_models(plan, [sequence], found)
    if asks:
        plan.asks, found = asks, [Proposal.chain(range(asks[0].depth), drafter="head")]
    [kept] = planner.prune(plan, [sequence], found)
    good = 4 if plan.asks[0].drafter == "head" else len(kept)
    planner.learn(plan, [sequence], [kept], [step(len(kept), min(good, len(kept)), rows=1 + len(kept))])
    return plan.asks[0].drafter if len(kept) else ""


def test_a_sure_find_needs_no_model_and_a_poor_one_does() -> None:
    planner, sequence = mixed(), Running()
    for _ in range(20):
        decide(planner, sequence, NO_DRAFT)
    assert decide(planner, sequence, copied(0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99)) == "lookup"
    assert decide(planner, sequence, copied(0.2, 0.3)) == "head"


def test_nodes_that_do_not_pay_are_left_out_under_load_only() -> None:
    find = copied(0.9, 0.9, 0.1, 0.9)
    table = CostTable(passes=CURVE, drafts={"lookup": DraftCosts(sequence=0.05)})
    kept = {}
    for batch in (1, 32):
        planner = Planner(EngineConfig(), table, [FakeLookup()])  # type: ignore[list-item]
        sequences = [Running(key=key) for key in range(batch)]
        plan = planner.open(sequences)
        proposals = planner.prune(plan, sequences, [find if ask.depth else NO_DRAFT for ask in plan.asks])
        kept[batch] = {len(proposal) for proposal in proposals}
    assert kept[1] == {3}, "rows up to eight are nearly free here"
    assert kept[32] <= {1, 2}, "a node of a tenth does not pay for half a millisecond"


def test_a_lookup_that_finds_nothing_worth_keeping_is_asked_less_under_load() -> None:
    table = CostTable(passes=RowCosts(rows=(1, 64), ms=(10.0, 100.0)), drafts={"lookup": DraftCosts(sequence=0.4)})
    planner = Planner(EngineConfig(), table, [FakeLookup()])  # type: ignore[list-item]
    sequences = [Running(key=key) for key in range(16)]
    looks = []
    for _ in range(100):
        plan = planner.open(sequences)
        found = [copied(0.05) if ask.depth else NO_DRAFT for ask in plan.asks]
        kept = planner.prune(plan, sequences, found)
        looks.append(sum(ask.depth > 0 for ask in plan.asks))
        rows = 16 + sum(map(len, kept))
        reports = [step(len(p), 0, batch_size=16, rows=rows, verify_ms=table.passes(rows)) for p in kept]
        planner.learn(plan, sequences, kept, reports)
    assert looks[0] == 16 and sum(looks[20:]) < 80 * 16 * 0.2


def test_a_fixed_schedule_leaves_no_node_out() -> None:
    planner = Planner(EngineConfig(schedule="fixed"), TABLE, [FakeLookup()])  # type: ignore[list-item]
    plan = planner.open([Running()])
    assert planner.prune(plan, [Running()], [copied(0.01)]) == [copied(0.01)]


# --- hidden states of the idle


class FakeReader(FakeModel):
    """Reads hidden states."""

    taps = (1,)

    def absorb(self, sequence: int, start: int, taps_RD: object) -> None: ...


def test_hidden_states_of_the_long_idle_lapse_and_are_warmed_up_before_a_try() -> None:
    planner = Planner(EngineConfig(), TABLE, [FakeReader(card_rates=(0.0,))])  # type: ignore[list-item]
    planner._purse.ms = -1e9
    sequence = Running()
    wanted = []
    for _ in range(LAPSE + 10):
        plan = planner.open([sequence])
        assert not planner.ask_models(plan, [sequence], [NO_DRAFT])
        wanted.append(planner.wants_taps(sequence))
    assert all(wanted[:LAPSE]) and not any(wanted[LAPSE + 2 :])
    planner._purse.ms, planner._nap_until, waited = 40.0, 0, 0
    while True:
        plan = planner.open([sequence])
        if planner.ask_models(plan, [sequence], [NO_DRAFT]):
            break
        assert planner.wants_taps(sequence), "kept again"
        waited += 1
    assert WARM <= waited <= WARM + 2 * NAP


class Hearing(Planner):
    """Counts in each step whose hidden states are kept, and of those the new ones'."""

    def __init__(self, table: CostTable = TABLE, **model: object) -> None:
        super().__init__(EngineConfig(), table, [FakeReader(**model)])  # type: ignore[list-item, arg-type]
        self.heard: list[int] = []
        self.known: set[int] = set()
        self.num_new: list[int] = []

    def prune(self, plan: StepPlan, sequences: Sequence[Plannable], proposals: Sequence[Proposal]) -> list[Proposal]:
        keys = {sequence.key for sequence in sequences if self.wants_taps(sequence)}
        self.heard.append(len(keys))
        self.num_new.append(len(keys - self.known))
        self.known |= {sequence.key for sequence in sequences}
        return super().prune(plan, sequences, proposals)


def test_of_a_drafter_that_nobody_has_any_use_for_few_are_listened_to() -> None:
    planner = Hearing()
    simulate(planner, batch=32, steps=1200, chance=lambda now, row: 0.0)
    late = planner.heard[2 * LAPSE :]
    assert max(planner.heard[:USE]) == 32, "it has yet to show what it is good for"
    assert sum(late) / len(late) <= 8
    assert 1 <= sum(planner.num_new[2 * LAPSE :]) <= len(late) / LAPSE + 1, "one of the new ones, now and then"
    assert planner.log.counters.tries > 10, "it must be tried now and then"


@pytest.mark.parametrize("batch", [1, 8])
def test_when_drafts_come_true_again_everybody_is_listened_to(batch: int) -> None:
    planner, change = Hearing(), 800
    simulate(planner, batch=batch, steps=2 * change, chance=lambda now, row: 0.0 if now < change else 0.9, length=100)
    assert batch == 1 or sum(planner.heard[change - 100 : change]) < 100 * batch * 0.8
    assert planner.heard[-100:] == [batch] * 100


def test_sequences_that_would_not_be_asked_are_not_listened_to_for_it() -> None:
    """Much is hoped of all together, though too little of each for a full pass."""
    planner = Hearing(CostTable(passes=CURVE, drafts={"head": DraftCosts(level=0.5)}), card_rates=(0.2,))
    planner._purse.ms = -1e9
    batch = [Running(key=key) for key in range(32)]
    for _ in range(3 * LAPSE):
        plan = planner.open(batch)
        assert not planner.ask_models(plan, batch, [NO_DRAFT] * 32)
        planner.prune(plan, batch, [NO_DRAFT] * 32)
    assert planner.heard[-1] == 0


@pytest.mark.parametrize(("num_steps_held", "most"), [(0.5, 4), (1.5, 12)])
def test_no_more_wait_for_a_try_than_the_purse_can_pay_for(num_steps_held: float, most: int) -> None:
    planner = Hearing(CostTable(passes=CURVE, drafts={"head": DraftCosts(fixed=2.0, sequence=1.0)}), card_rates=(0.0,))
    planner._purse.ms = -1e9
    batch = [Running(key=key) for key in range(32)]
    for now in range(LAPSE + 20):
        if now == LAPSE + 10:
            planner._purse.ms, planner._nap_until = num_steps_held * CURVE(32), 0
        plan = planner.open(batch)
        planner.ask_models(plan, batch, [NO_DRAFT] * 32)
        planner.prune(plan, batch, [NO_DRAFT] * 32)
    assert 1 <= planner.heard[-1] <= most


def test_a_hopeless_drafter_is_tried_for_less() -> None:
    found = simulate(make_planner(), batch=32, steps=2000, chance=lambda now, row: 0.0)
    assert 1 - found.speed / fixed_speed(32, 0, 0.0) <= HOPELESS_SHARE + 0.003
    assert HOPELESS_SHARE + 0.003 < TRY_SHARE


def test_what_was_heard_before_a_lapse_is_not_in_the_price() -> None:
    """Hidden states of a long prompt are void behind a gap: a try reads what it was warmed up with."""
    dear = CostTable(passes=CURVE, drafts={"head": DraftCosts(fixed=0.2, level=0.5, row=0.05)})
    planner = Hearing(dear, card_rates=(0.0,), unread=100_000)
    sequence, steps = Running(), LAPSE + WARM + 200
    tried = 0
    for _ in range(steps):
        plan = planner.open([sequence])
        tried += bool(planner.ask_models(plan, [sequence], [NO_DRAFT]))
        planner.prune(plan, [sequence], [NO_DRAFT])
    assert tried


def test_new_sequences_are_listened_to_while_there_is_use_for_it() -> None:
    use, now = Use(), LAPSE + 1
    listeners = Listeners(use)

    def is_heard(step: int) -> bool:
        own = Own(Belief(), step)
        listeners.admit(own, step)
        return listeners.keeps(own, step)

    assert [is_heard(step) for step in (1, 2, LAPSE)] == [True] * 3, "at first"
    assert [is_heard(now + later) for later in (0, 50, LAPSE - 2, LAPSE - 1, LAPSE)] == [False] * 3 + [True, False]
    later = 3 * LAPSE
    use.note(later)
    assert use.is_recent(later + USE) and not use.is_recent(later + USE + 1), "once is not much"
    assert is_heard(later + 1) and is_heard(later + 2)
    for now in range(later, later + 50):
        use.note(now)
    assert use.is_recent(later + 49 + LAPSE) and not use.is_recent(later + 50 + LAPSE)


@pytest.mark.parametrize(("accepted", "heard"), [(0, False), (1, True)])
def test_whoever_was_tried_is_listened_to_if_anything_came_of_it(accepted: int, heard: bool) -> None:
    """Where nobody else has any use for the drafter."""
    planner, sequence = Hearing(card_rates=(0.0,)), Running()
    planner._purse.ms = -1e9
    for _ in range(2 * LAPSE):
        planner.open([sequence])
        planner.wants_taps(sequence)
    planner._purse.ms, planner._nap_until, asks = 30.0, 0, []
    while not asks:
        plan = planner.open([sequence])
        asks = planner.ask_models(plan, [sequence], [NO_DRAFT])
    assert planner.wants_taps(sequence) and plan.tried
    plan.asks, planner._purse.ms = asks, -1e9
    report = step(1, accepted, rows=2)
    planner.learn(plan, [sequence], [Proposal.chain([1], drafter="head")], [report])
    planner.open([sequence])
    assert planner.wants_taps(sequence) is heard


def test_reading_what_was_missed_is_part_of_the_price() -> None:
    table = CostTable(passes=CURVE, drafts={"head": DraftCosts(fixed=0.2, level=0.5, row=0.05)})
    cheap, dear = (Planner(EngineConfig(), table, [FakeModel(unread=n)]) for n in (2, 100_000))  # type: ignore[list-item]
    for planner, drafts in ((cheap, True), (dear, False)):
        assert any(asked(planner, Running())) == drafts


# --- the record


def test_decisions_are_on_record() -> None:
    planner = make_planner()
    simulate(planner, batch=4, steps=30, chance=lambda now, row: 0.8)
    records, counters = list(planner.log.records), planner.log.counters
    assert len(records) == counters.steps == 30 and counters.sequences == 120
    assert counters.nodes == sum(record.nodes for record in records) > 0
    late = records[10:]
    predicted = sum(record.predicted_tokens for record in late) / sum(record.tokens for record in late)
    assert 0.8 < predicted < 1.25
    assert all(record.predicted_ms == pytest.approx(CURVE(4 + record.nodes) + 4.5, abs=4.6) for record in late)
    found = planner.snapshot()
    assert found["schedule"] == "adaptive" and found["counters"]["steps"] == 30
    assert found["last"] == records[-1].to_json()
    assert 0.5 < found["drafters"]["head"]["keep_rates"][0] <= 1
    assert found["costs"]["passes_ms"]["1"] == pytest.approx(10.0, rel=0.2)


def test_a_report_without_drafts_teaches_nothing_about_depths() -> None:
    planner = make_planner()
    plan = planner.open([Running()])
    planner.prune(plan, [Running()], [NO_DRAFT])
    planner.learn(plan, [Running()], [NO_DRAFT], [StepReport(tokens=(1,), verify_ms=10.0)])
    assert planner.evidence.pooled["head"].ever.asked == 0
