"""Every planted fault is rejected by the suite, and by nothing but the fault: the same tests pass on an unchanged copy.

Read :mod:`tests.mutants.catalogue` for what is planted and why each is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import GROUPS, MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import copy_package, plant, run_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_suite_rejects(mutant: Mutant, tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    plant(mutant, package)
    outcome = run_tests(package, mutant.tests, tmp_path)
    assert outcome.is_rejection, f"{mutant.name} ended with {outcome.code}; {mutant.why}\n{outcome.output}"


@pytest.mark.parametrize("group", GROUPS)
def test_the_same_tests_pass_without_a_fault(group: str, tmp_path: Path) -> None:
    tests = dict.fromkeys(test for mutant in GROUPS[group] for test in mutant.tests)
    outcome = run_tests(copy_package(tmp_path), list(tests), tmp_path)
    assert outcome.all_passed, outcome.output


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_gone_or_stands_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for old in ("c = 1", "= 1"):
        mutant = Mutant(name="stale", file="code.py", old=old, new="", tests=(), why="")
        with pytest.raises(ValueError, match="not once"):
            plant(mutant, tmp_path)
