"""Decode one chat with drafts, and see what they gained. Run: python examples/quickstart.py"""

from outrider import Engine, SamplingParams, load_target, make_drafter


def main(target, max_tokens=64):
    engine = Engine(target, drafter=make_drafter("suffix", target))
    chat = [{"role": "user", "content": "Name three rivers, then name them again."}]
    [result] = engine.generate([chat], SamplingParams(max_tokens=max_tokens))
    print(result.text)
    print(f"{result.stats.tokens_per_pass:.2f} tokens a pass, {result.stats.accepted} draft tokens kept")
    return result


if __name__ == "__main__":
    main(load_target("smollm2-135m-instruct"))
