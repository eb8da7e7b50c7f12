"""Faults that a tired author could plant: one changed line of the package each, and tests that must reject it.

Only faults that change output, or a number that is reported, are here; most of those that cost speed alone are no lies.
"""

from __future__ import annotations

from tests.mutants.audits import AUDITS
from tests.mutants.doctor import DOCTOR
from tests.mutants.grammars import GRAMMARS
from tests.mutants.judgements import JUDGEMENTS
from tests.mutants.laws import NOISE, SAMPLERS, VERIFIERS
from tests.mutants.machinery import CACHES, COUNTS, DRAFTERS, MODELS, STOPS
from tests.mutants.mutant import Mutant
from tests.mutants.planning import LOOKAHEAD, PLANNERS
from tests.mutants.replaying import REPLAYS
from tests.mutants.scheduling import SCHEDULERS
from tests.mutants.serving import SERVING
from tests.mutants.training import TRAINING

__all__ = ["GROUPS", "MUTANTS"]

GROUPS: dict[str, tuple[Mutant, ...]] = {
    "laws": (*VERIFIERS, *NOISE, *SAMPLERS),
    "audits": AUDITS,
    "machinery": (*CACHES, *MODELS, *STOPS, *COUNTS, *DRAFTERS),
    "planning": (*LOOKAHEAD, *PLANNERS),
    "scheduling": SCHEDULERS,
    "grammars": GRAMMARS,
    "serving": SERVING,
    "doctor": DOCTOR,
    "judgements": JUDGEMENTS,
    "replays": REPLAYS,
    "training": TRAINING,
}
MUTANTS = tuple(mutant for group in GROUPS.values() for mutant in group)
