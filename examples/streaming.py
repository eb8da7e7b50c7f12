"""Print text as it is decided, from two chats at once. Run: python examples/streaming.py"""

import asyncio

from outrider import Engine, SamplingParams, load_target, make_drafter

QUESTIONS = ["Count from one to twenty.", "Say the alphabet, twice."]


async def follow(engine, number, question, params):
    text = ""
    async for event in engine.astream([{"role": "user", "content": question}], params):
        text += event.text  # final: it never changes again
        print(f"[{number}] {event.text!r}")
    return text


def main(target, max_tokens=64):
    engine = Engine(target, drafter=make_drafter("ngram", target))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=1)

    async def both():
        # Both run in the same passes; a seed makes each answer what it would be alone.
        return await asyncio.gather(*(follow(engine, i, q, params) for i, q in enumerate(QUESTIONS)))

    return asyncio.run(both())


if __name__ == "__main__":
    main(load_target("smollm2-135m-instruct"))
