"""Faults in what a measurement says of its counts: rates, intervals, forecasts, recommendations, the report."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["JUDGEMENTS"]

STATS = "tests/measure/test_stats.py"
FORECAST = "tests/measure/test_forecast.py"
REPORT = "tests/measure/test_report.py"
PAGE = "tests/measure/test_page.py"

JUDGEMENTS = (
    Mutant(
        name="text_of_another_model_is_judged_by",
        file="measure/stats.py",
        old="if not record.is_on_policy:",
        new="if False:",
        tests=(f"{REPORT}::test_off_policy_repeated_and_synthetic_requests_decide_nothing",),
        why="acceptance on text that the target would not have said is not the acceptance that it will see",
    ),
    Mutant(
        name="conditional_rates_over_all_steps",
        file="measure/stats.py",
        old="_divide(ours, of)",
        new="_divide(ours, steps)",
        tests=(f"{STATS}::test_rates_are_those_of_the_pooled_counts",),
        why="the two rates of the glossary would be one",
    ),
    Mutant(
        name="few_lines_are_as_sure_as_many",
        file="measure/stats.py",
        old="return _NORMAL.cdf(-wide)",
        new="return (1 - _LEVEL) / 2",
        tests=(f"{STATS}::test_few_lines_have_wider_ends_than_plain_quantiles",),
        why="the plain percentile interval of few lines holds the truth less often than it says",
    ),
    Mutant(
        name="drafting_costs_nothing",
        file="measure/forecast.py",
        old="pass_ms(costs, 1 + drafts_per_step) + costs.draft_ms[arm.name]",
        new="pass_ms(costs, 1 + drafts_per_step)",
        tests=(f"{FORECAST}::test_the_worked_example",),
        why="a slow drafter would be called a gain",
    ),
    Mutant(
        name="judged_on_the_half_that_chose",
        file="measure/forecast.py",
        old="record.line not in first",
        new="record.line in first",
        tests=(f"{FORECAST}::test_a_choice_among_equals_is_not_taken_for_a_gain",),
        why="the luckiest of many arms would be taken for a better one",
    ),
    Mutant(
        name="words_of_the_traffic_become_code_of_the_page",
        file="measure/page_parts.py",
        old="return html.escape(str(value), quote=True)",
        new="return str(value)",
        tests=(f"{PAGE}::test_words_from_outside_are_never_code",),
        why="a report is opened in browsers of people who did not write the traffic",
    ),
)
