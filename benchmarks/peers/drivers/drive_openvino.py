"""OpenVINO GenAI's pipelines. Options: ``prompt_lookup``, draft tokens a step (0: plain), ``max_ngram``, and
``max_batched_tokens``, the longest part of a prompt that is read at a time (left out: the pipeline's own choice).
"""

from __future__ import annotations

import time
from typing import Any

from wire import Handler, Reply, cut, serve, versions

CACHE_GB = 2


def num_passes(result: Any) -> int | None:
    """Decode passes: steps that brought tokens, without the first; ``None`` where the record is not whole."""
    steps = list(result.perf_metrics.raw_metrics.m_batch_sizes)
    return len(steps) - 1 if steps and sum(steps) == len(result.m_generation_ids[0]) else None


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """A continuous-batching pipeline without prefix caching, so that each prompt is read in whole."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = max(1, start["streams"])
    scheduler.enable_prefix_caching = False
    if "max_batched_tokens" in start["options"]:
        scheduler.max_num_batched_tokens = start["options"]["max_batched_tokens"]
    lookup = start["options"]["prompt_lookup"]
    properties = {"INFERENCE_NUM_THREADS": start["threads"], **({"prompt_lookup": True} if lookup else {})}
    pipeline = genai.ContinuousBatchingPipeline(start["model"], scheduler, "CPU", properties)

    def config_of(request: dict[str, Any]) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.do_sample = False
        config.eos_token_id = request["stop_ids"][0]
        config.stop_token_ids = set(request["stop_ids"])
        if lookup:
            config.num_assistant_tokens = lookup
            config.max_ngram_size = start["options"]["max_ngram"]
        return config

    def answer(request: dict[str, Any]) -> Reply:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request["prompts"]]
        begun = time.perf_counter()
        results = pipeline.generate(prompts, [config_of(request)] * len(prompts))
        wall_s = time.perf_counter() - begun
        answers = [
            {
                "tokens": cut(list(result.m_generation_ids[0]), request["stop_ids"]),
                "first_s": result.perf_metrics.get_ttft().mean / 1e3,
            }
            for result in results
        ]
        passes = [num_passes(result) for result in results]
        told = {} if None in passes else {"passes": sum(passes)}
        return {"answers": answers, "wall_s": wall_s, **told}

    return answer, {"versions": versions("openvino", "openvino-genai")}


if __name__ == "__main__":
    serve(load)
