"""Faults in planning: looking ahead, which biases the output, and decisions that cost speed or break a promise."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["LOOKAHEAD", "PLANNERS"]

LAW = "tests/engine/test_planner_law.py::test_budgets_and_choices_from_any_history_keep_the_law"
PLANNER = "tests/engine/test_planner.py"
BELIEFS = "tests/engine/test_beliefs.py"
ALLOCATION = "tests/engine/test_allocation.py"
COSTS = "tests/engine/test_costs.py"
WISHES = "tests/engine/test_speculation.py"
TAPS = "tests/engine/test_taps.py"

_TAKEN = "            proposals[index] = proposal\n        depth = max("

LOOKAHEAD = (
    Mutant(
        name="planner_drops_a_drawn_draft_for_what_it_is",
        file="engine/drafting.py",
        old=_TAKEN,
        new="            proposals[index] = NO_DRAFT if proposal.tokens[:1] == (0,) else proposal\n        depth = max(",
        tests=(LAW,),
        why="whether a token is verified depends on the token: its probability is then wrong, however well it is verified",
    ),
    Mutant(
        name="budget_is_the_best_for_what_was_drawn",
        file="engine/drafting.py",
        old=_TAKEN,
        new="            laws_NV = proposal.draft_probs_NV\n"
        "            odds = [1.0] if laws_NV is None else [float(laws_NV[n, t]) for n, t in enumerate(proposal.tokens)]\n"
        "            unlikely = [n for n, odd in enumerate(odds) if odd < 0.5]\n"
        "            proposals[index] = proposal.truncate(unlikely[0]) if unlikely else proposal\n"
        "        depth = max(",
        tests=(LAW,),
        why="the length that looks best for the drawn tokens is a function of the drawn tokens",
    ),
    Mutant(
        name="drafter_is_chosen_after_its_draw",
        file="engine/drafting.py",
        old="            if ask.depth and len(found[index]) == 0 and len(proposals[index]):\n",
        new="            if ask.depth and len(proposals[index]) and found[index].tokens[:1] != proposals[index].tokens[:1]:\n",
        tests=(LAW,),
        why="a draw that is given up for another's find is a draw that was dropped for what it is",
    ),
    Mutant(
        name="drafts_behind_a_refusal_are_evidence",
        file="engine/beliefs.py",
        old="            break\n        flags.append(bool(kept))\n",
        new="            pass\n        flags.append(bool(kept))\n",
        tests=(BELIEFS,),
        why="how many there were depends on tokens whose noise draws again in the next step",
    ),
)

PLANNERS = (
    Mutant(
        name="copies_behind_a_tree_cost_rows",
        file="engine/allocation.py",
        old="        if depth < bid.levels:\n",
        new="        if True:\n",
        tests=(ALLOCATION, PLANNER),
        why="a merged tree has a budget of nodes; pricing depth past it keeps the planner from following long copies",
    ),
    Mutant(
        name="budget_ignores_the_end_of_the_output",
        file="engine/planner.py",
        old="return max(0, min(sequence.most_drafts, most)) if wishes.enabled else 0",
        new="return most if wishes.enabled else 0",
        tests=(
            f"{PLANNER}::test_the_end_of_the_output_bounds_the_depth",
            "tests/engine/test_identity.py::test_the_window_ends_the_output",
        ),
        why="drafts past max_tokens cannot be committed, and past the window they cannot even be computed",
    ),
    Mutant(
        name="planner_never_tries_again",
        file="engine/idle.py",
        old="self.ms = min(held + share * plain_ms, MOST_PURSE * plain_ms)",
        new="self.ms = 0.0",
        tests=(f"{PLANNER}::test_a_change_of_the_text_is_followed",),
        why="a text may turn predictable",
    ),
    Mutant(
        name="planner_never_gives_up",
        file="engine/allocation.py",
        old="depths, best, taken = [0] * len(bids), step.speed * margin, 0",
        new="depths, best, taken = [0] * len(bids), 0.0, 0",
        tests=(f"{ALLOCATION}::test_nothing_is_drafted_where_nothing_pays",),
        why="speculation that does not pay must not make a user slower",
    ),
    Mutant(
        name="drafting_is_free",
        file="engine/allocation.py",
        old="        speed = tokens / (step.ms_with(rows) + ms)\n",
        new="        speed = tokens / step.ms_with(rows)\n",
        tests=(f"{PLANNER}::test_never_far_from_the_best_fixed_length", ALLOCATION),
        why="a drafter's own time counts",
    ),
    Mutant(
        name="a_lookup_that_is_replaced_is_counted_as_well",
        file="engine/allocation.py",
        old="            tokens -= bid.lost\n",
        new="",
        tests=(f"{ALLOCATION}::test_a_model_replaces_a_find_only_where_it_gains_more",),
        why="what the model gains must be more than what it takes the place of",
    ),
    Mutant(
        name="wish_for_plain_decoding_is_ignored",
        file="engine/planner.py",
        old="return max(0, min(sequence.most_drafts, most)) if wishes.enabled else 0",
        new="return max(0, min(sequence.most_drafts, most))",
        tests=(f"{WISHES}::test_not_enabled_means_plain",),
        why="a field is honoured or refused",
    ),
    Mutant(
        name="wish_for_a_drafter_is_ignored",
        file="engine/planner.py",
        old="return names if wanted is None else [name for name in names if name == wanted]",
        new="return names",
        tests=(f"{WISHES}::test_the_named_drafter_alone",),
        why="a field is honoured or refused",
    ),
    Mutant(
        name="wild_clocks_are_believed",
        file="engine/costs.py",
        old="    return min(max(ratio, 1 / most), most)\n",
        new="    return ratio\n",
        tests=(f"{COSTS}::test_one_wild_pass_changes_little",),
        why="one pass that was interrupted must not decide the next thousand",
    ),
    Mutant(
        name="what_drafts_cost_is_charged_to_plain_steps",
        file="engine/costs.py",
        old="(self._excess.factor if is_drafted else 1.0)",
        new="self._excess.factor",
        tests=(f"{COSTS}::test_what_drafts_cost_besides_their_rows_is_not_charged_to_plain_steps",),
        why="plain decoding then seems as slow as drafting, and drafting goes on where it loses",
    ),
    Mutant(
        name="plain_steps_are_never_looked_at",
        file="engine/planner.py",
        old="is_due and self._purse.pay(",
        new="False and self._purse.pay(",
        tests=(f"{PLANNER}::test_what_no_table_knows_of_drafts_does_not_make_plain_steps_look_slow",),
        why="a planner that always drafts cannot know what it loses",
    ),
    Mutant(
        name="lapsed_hidden_states_are_drafted_from_at_once",
        file="engine/idle.py",
        old="    if step - own.warm_since < WARM:\n        return False\n",
        new="",
        tests=(f"{PLANNER}::test_hidden_states_of_the_long_idle_lapse_and_are_warmed_up_before_a_try",),
        why="the drafter has not seen the last tokens' hidden states",
    ),
    Mutant(
        name="the_idle_are_handed_hidden_states",
        file="engine/step.py",
        old="    taps = wanted_taps(drafter) if chunks or any(listeners) else ()\n",
        new="    taps = wanted_taps(drafter)\n",
        tests=(f"{TAPS}::test_passes_of_the_long_idle_compute_no_taps",),
        why="whoever does not draft should not pay for drafting",
    ),
    Mutant(
        name="everybody_listens_to_a_drafter_of_no_use",
        file="engine/idle.py",
        old="own.has_lapsed = step < self._next_new and not self._use.is_recent(step)",
        new="own.has_lapsed = False",
        tests=(f"{PLANNER}::test_of_a_drafter_that_nobody_has_any_use_for_few_are_listened_to",),
        why="each new request would pay for what nobody reads",
    ),
    Mutant(
        name="all_wait_for_a_try_that_the_purse_pays_for_one",
        file="engine/model_asks.py",
        old="                awaited += price\n",
        new="                awaited += 0.0\n",
        tests=(f"{PLANNER}::test_no_more_wait_for_a_try_than_the_purse_can_pay_for",),
        why="hidden states that lapse again before anybody is asked were kept for nothing",
    ),
    Mutant(
        name="the_hoped_for_listen_though_they_are_not_asked",
        file="engine/model_asks.py",
        old="for index in depths if not self._is_ready(",
        new="for index in hoped if not self._is_ready(",
        tests=(f"{PLANNER}::test_sequences_that_would_not_be_asked_are_not_listened_to_for_it",),
        why="a drafter that is promising and does not pay would be listened to for ever",
    ),
    Mutant(
        name="the_hopeless_are_tried_as_often_as_anybody",
        file="engine/planner.py",
        old="is_hopeless=self._is_hopeless()",
        new="is_hopeless=False",
        tests=(f"{PLANNER}::test_a_hopeless_drafter_is_tried_for_less",),
        why="with what keeping hidden states costs, too little would be left of three per cent",
    ),
    Mutant(
        name="a_prompt_that_was_forgotten_is_in_the_price",
        file="engine/model_asks.py",
        old="return min(unread, WARM) if own.has_lapsed else unread",
        new="return unread",
        tests=(f"{PLANNER}::test_what_was_heard_before_a_lapse_is_not_in_the_price",),
        why="behind a long prompt nothing would ever be tried again",
    ),
    Mutant(
        name="whoever_was_tried_in_vain_is_listened_to",
        file="engine/idle.py",
        old="        own.has_lapsed = own.has_lapsed or not self._use.is_recent(step)\n",
        new="",
        tests=(f"{PLANNER}::test_whoever_was_tried_is_listened_to_if_anything_came_of_it",),
        why="the next try of this sequence is far away",
    ),
)
