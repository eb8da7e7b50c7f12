"""Outrider itself. Options: ``precision``, ``drafter``, ``num_draft_tokens``."""

from __future__ import annotations

import time
from typing import Any

from wire import Handler, Reply, serve


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """One engine for the whole round, so that a drafter may learn from earlier prompts, as in service."""
    import torch

    torch.set_num_threads(start["threads"])
    from outrider.drafters.build import make_drafter
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.models.load import load_target
    from outrider.sampling.params import SamplingParams

    options = start["options"]
    target = load_target(start["model"], dtype=options["precision"], device="cpu")
    config = EngineConfig.from_dict(
        {
            "num_draft_tokens": options["num_draft_tokens"],
            "max_batch_size": max(1, start["streams"]),
            "num_cached_prefixes": 0,
        }
    )
    engine = Engine(target, drafter=make_drafter(options["drafter"], target), config=config)

    def answer(request: dict[str, Any]) -> Reply:
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
        begun = time.perf_counter()
        results = engine.generate([list(prompt) for prompt in request["prompts"]], params)
        wall_s = time.perf_counter() - begun
        stats = [result.stats for result in results]
        return {
            "answers": [{"tokens": list(r.token_ids), "first_s": r.timing.prefill / 1e3} for r in results],
            "wall_s": wall_s,
            "passes": sum(each.passes for each in stats),
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
        }

    return answer, {"versions": {"torch": torch.__version__}, "note": f"passes run {target.spec.path}"}


if __name__ == "__main__":
    serve(load)
