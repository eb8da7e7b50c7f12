"""The state of a run on disk: one file, replaced whole, so that a killed run goes on from its last good state.

Nothing random is consumed in order: start weights and the order of texts are functions of the seed and the epoch, so that
weights, optimiser and the number of the update are all there is to store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.errors import DataError
from outrider.train.files import replace_file
from outrider.train.loop import Trainer

__all__ = ["load_state", "save_state"]

_VERSION = 1


def save_state(path: Path, trainer: Trainer, *, recipe: Mapping[str, Any], best: float) -> None:
    """Store the run.

    Args:
        path: file to replace.
        trainer: its weights must be finite: a broken state never takes the place of a good one.
        recipe: what the run is, as plain values; a run with another recipe cannot go on from here.
        best: held-out tokens a pass of the best head so far.
    """
    assert all(bool(p.isfinite().all()) for p in trainer.head.parameters()), "a state that must not be saved"
    state = {"version": _VERSION, "recipe": dict(recipe), "best": best, **trainer.state()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda partial: torch.save(state, partial))


def load_state(path: Path, trainer: Trainer, *, recipe: Mapping[str, Any]) -> float:
    """Go on from a stored run; returns the held-out tokens a pass of its best head.

    Raises:
        DataError: a file of something else, or of another recipe (the first difference is named).
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise DataError(f"{path} is not the state of a training run: {str(error).splitlines()[0]}") from None
    before = state.get("recipe", {})
    for name, value in recipe.items():
        if before.get(name) != value:
            raise DataError(
                f"{path} belongs to a run with {name} = {before.get(name)!r}, now it is {value!r}; "
                "give the same options, or another --out"
            )
    trainer.restore(state)
    return float(state["best"])
