"""Faults in replay: drafters would be praised or blamed for what decoding does not do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["REPLAYS"]

REPLAY = "tests/measure/test_replay.py"
EXPECTED = "tests/measure/test_expected.py"
ANSWERS = "tests/measure/test_answers.py"
PLANNED = "tests/measure/test_planned.py"
TIES = "tests/measure/test_ties.py"

REPLAYS = (
    Mutant(
        name="every_place_is_a_start",
        file="measure/expected.py",
        old="    mass[min(1, num_output)] = 1.0\n",
        new="    mass = [1.0] * (num_output + 1)\n",
        tests=(f"{EXPECTED}::test_expectations_of_a_language_models_chains_are_the_live_law[5-0]",),
        why="steps start where drafts fail, so places are not equally likely starts",
    ),
    Mutant(
        name="acceptance_of_drafts_not_given_the_text",
        file="measure/expected.py",
        old="min(1.0, d / t)",
        new="min(1.0, t / max(d, 1e-9))",
        tests=(f"{EXPECTED}::test_expectations_of_a_language_models_chains_are_the_live_law[5-0]",),
        why="given that the text shows a token, it was a kept draft with probability min(draft, target) / target",
    ),
    Mutant(
        name="drafts_past_the_limit",
        file="measure/replay.py",
        old="budgets.setdefault(max(0, min(k, self._limit - start - 1)), [])",
        new="budgets.setdefault(max(0, min(k, self._limit - start)), [])",
        tests=(f"{REPLAY}::test_ends_are_counted_as_in_decoding",),
        why="the engine leaves room for the correction or bonus token",
    ),
    Mutant(
        name="bonus_behind_the_end",
        file="measure/replay.py",
        old="return min(num_kept + 1, len(self.output) - self.here)",
        new="return num_kept + 1",
        tests=(f"{REPLAY}::test_ends_are_counted_as_in_decoding",),
        why="nothing is committed behind a stop",
    ),
    Mutant(
        name="answers_are_remembered_without_their_ends",
        file="measure/expected.py",
        old="        self.advance(len(self.read.text.output))\n        self._drafter.finish",
        new="        self._drafter.finish",
        tests=(f"{REPLAY}::test_a_text_remembers_only_what_was_said_before_it",),
        why="a finished answer is remembered whole",
    ),
    Mutant(
        name="any_text_is_the_targets_own",
        file="measure/target_pass.py",
        old="return agreement >= MIN_AGREEMENT or",
        new="return agreement >= 0 or",
        tests=(f"{ANSWERS}::test_text_of_another_model_is_off_policy",),
        why="acceptance on another model's text says nothing of this one's",
    ),
    Mutant(
        name="a_plan_drafts_as_deep_as_it_likes",
        file="measure/planned.py",
        old="return proposal if asked.is_cut else proposal.truncate(asked.num_nodes)",
        new="return proposal",
        tests=(f"{PLANNED}::test_a_plan_that_drafted_less_is_followed",),
        why="draft tokens that the planner left out were never checked",
    ),
    Mutant(
        name="a_plan_of_another_text_is_followed",
        file="measure/planned.py",
        old="    if here < len(output):\n",
        new="    if here < 0:\n",
        tests=(f"{PLANNED}::test_a_plan_of_another_text_is_refused",),
        why="half a text would count as the whole",
    ),
    Mutant(
        name="every_draft_is_a_tie",
        file="measure/ties.py",
        old="        if gap <= tolerance:\n",
        new="        if gap >= 0:\n",
        tests=(TIES,),
        why="a list of ties that holds everything explains anything",
    ),
)
