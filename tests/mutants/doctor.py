"""Faults in the doctor: numbers that would accuse the wrong part."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["DOCTOR"]

REPLAY = "tests/audit/doctor/test_replay.py"
METRICS = "tests/audit/doctor/test_metrics_text.py"

DOCTOR = (
    Mutant(
        name="replay_walk_forgets_the_bonus_token",
        file="audit/doctor/replay.py",
        old="start += kept + 1",
        new="start += max(kept, 1)",
        tests=(f"{REPLAY}::test_a_walk_by_hand",),
        why="a pass also commits the target's own token",
    ),
    Mutant(
        name="any_difference_is_proved",
        file="audit/doctor/report.py",
        old="return self.num_requests >= _LEAST_REQUESTS and self.low > _LEAST_GAIN",
        new="return self.after > self.before",
        tests=(f"{REPLAY}::test_gains_are_paired_over_requests",),
        why="noise would be named as a cause",
    ),
    Mutant(
        name="refusals_hide_what_was_proved",
        file="audit/doctor/report.py",
        old='return (_ORDER[finding.status], finding.status == "refused", -gain, -finding.weight)',
        new='return (_ORDER[finding.status], finding.status != "refused", -gain, -finding.weight)',
        tests=(f"{REPLAY}::test_the_order_of_findings",),
        why="that a head does not load says less than why",
    ),
    Mutant(
        name="served_rates_divide_by_draft_tokens",
        file="audit/doctor/metrics_text.py",
        old="accepted_length=1 + accepted / steps if steps else 1.0,",
        new="accepted_length=1 + accepted / drafted if drafted else 1.0,",
        tests=(f"{METRICS}::test_vllm_counters",),
        why="accepted length counts steps, not draft tokens",
    ),
)
