"""Every planted fault is rejected by the suite, and by nothing but the fault: the same tests pass on an unchanged copy.

Read :mod:`tests.mutants.catalogue` for what is planted and why each is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import GROUPS, MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import Judges, link_package, plant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_suite_rejects(mutant: Mutant, judges: Judges, pristine: Path, tmp_path: Path) -> None:
    package = link_package(pristine, tmp_path)
    plant(mutant, package)
    outcome = judges.run(package, mutant.tests, tmp_path)
    assert outcome.is_rejection, f"{mutant.name} ended with {outcome.code}; {mutant.why}\n{outcome.output}"


@pytest.mark.parametrize("group", GROUPS)
def test_the_same_tests_pass_without_a_fault(group: str, judges: Judges, pristine: Path, tmp_path: Path) -> None:
    tests = dict.fromkeys(test for mutant in GROUPS[group] for test in mutant.tests)
    outcome = judges.run(link_package(pristine, tmp_path), list(tests), tmp_path)
    assert outcome.all_passed, outcome.output


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
