"""Decode a batch with and without drafts, compare, and pool the numbers. Run: python examples/batch.py"""

from outrider import Engine, EngineConfig, SamplingParams, load_target, make_drafter
from outrider.metrics import SpeculationStats

PROMPTS = [
    "The days of the week are Monday, Tuesday, Wednesday, Thursday,",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
    "A short letter to a friend who moved to the sea:",
]


def main(target, max_tokens=48):
    params = SamplingParams(max_tokens=max_tokens)
    plain = Engine(target).generate(PROMPTS, params)
    config = EngineConfig(num_draft_tokens=6)
    drafted = Engine(target, drafter=make_drafter("suffix", target), config=config).generate(PROMPTS, params)
    for prompt, a, b in zip(PROMPTS, plain, drafted, strict=True):
        same = "identical" if a.token_ids == b.token_ids else "differs (see: outrider audit identity)"
        print(f"{prompt[:30]!r}: {b.stats.tokens_per_pass:.2f} tokens a pass, {same}")
    pooled = SpeculationStats.pooled(result.stats for result in drafted)
    print(f"all: {pooled.tokens_per_pass:.2f} tokens a pass, {pooled.accepted} of {pooled.drafted} draft tokens kept")
    return plain, drafted


if __name__ == "__main__":
    main(load_target("smollm2-135m-instruct"))
