"""Faults that a tired author could plant: one changed line of the package each, and tests that must reject it.

Only faults that change output, or a number that is reported, are here; most of those that cost speed alone are no lies.
"""

from __future__ import annotations

from tests.mutants.laws import NOISE, SAMPLERS, VERIFIERS
from tests.mutants.machinery import CACHES, COUNTS, DRAFTERS, MODELS, STOPS
from tests.mutants.mutant import Mutant
from tests.mutants.planning import LOOKAHEAD, PLANNERS

__all__ = ["GROUPS", "MUTANTS"]

GROUPS: dict[str, tuple[Mutant, ...]] = {
    "laws": (*VERIFIERS, *NOISE, *SAMPLERS),
    "machinery": (*CACHES, *MODELS, *STOPS, *COUNTS, *DRAFTERS),
    "planning": (*LOOKAHEAD, *PLANNERS),
}
MUTANTS = tuple(mutant for group in GROUPS.values() for mutant in group)
