"""Faults in the audit of calibration itself: each would make it blind, or accuse a sound engine."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["AUDITS"]

STATISTICS = "tests/audit/test_statistics.py"
SCORING = "tests/audit/test_scoring.py"
CALIBRATION = "tests/audit/test_calibration.py"

AUDITS = (
    Mutant(
        name="transform_ordered_by_token_id",
        file="audit/scoring.py",
        old="is_likelier_TM = (values_TM > own_T1) | ((values_TM == own_T1) & (ids_TM < tokens_T.unsqueeze(1)))",
        new="is_likelier_TM = ids_TM < tokens_T.unsqueeze(1)",
        tests=(f"{SCORING}::test_every_number_is_that_of_the_engines_own_law[rich]",),
        why="it would still be uniform, and nearly blind to a law that is sharpened",
    ),
    Mutant(
        name="laws_forget_the_output_before_them",
        file="audit/scoring.py",
        old="paths = [output.tokens[start:position] for position in range(start, stop)]",
        new="paths = [() for _ in range(start, stop)]",
        tests=(f"{SCORING}::test_every_number_is_that_of_the_engines_own_law[rich]",),
        why="penalties and bans read the whole history",
    ),
    Mutant(
        name="a_stratum_looks_at_the_token",
        file="audit/channels.py",
        old='strata[f"{guess} names the mode"] = named & scores.is_mode[guess]',
        new='strata[f"{guess} names the mode"] = named & scores.hits[guess]',
        tests=(f"{SCORING}::test_a_stratum_does_not_look_at_the_token_itself",),
        why="among tokens that came out as guessed, all came out as guessed",
    ),
    Mutant(
        name="a_bet_that_is_not_fair",
        file="audit/statistics.py",
        old="np.log1p(np.outer(p, np.expm1(leans)))",
        new="np.outer(p, leans)",
        tests=(f"{STATISTICS}::test_bets_on_named_tokens_and_on_likelihood_are_fair",),
        why="capital that grows by itself accuses everybody",
    ),
    Mutant(
        name="repeated_answers_go_unnoticed",
        file="audit/calibration.py",
        old="if before is not None and chance < REPEAT_CHANCE:",
        new="if before is not None and chance < 0:",
        tests=(f"{CALIBRATION}::test_noise_used_twice_voids_the_audit",),
        why="a thousand copies of one answer are one answer",
    ),
)
