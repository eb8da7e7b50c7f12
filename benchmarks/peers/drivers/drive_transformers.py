"""transformers' ``generate`` in bfloat16. Option: ``prompt_lookup``, draft tokens a step (0: plain decoding)."""

from __future__ import annotations

import time
from typing import Any

from wire import Handler, Reply, cut, serve


class Stamps:
    """A streamer that notes when tokens came; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


class Decoder:
    """One model, run one prompt at a time, or ``streams`` left-padded ones together."""

    def __init__(self, model: Any, prompt_lookup: int, streams: int) -> None:
        self._model, self._size = model, 1 if prompt_lookup else max(1, streams)
        self._extra = {"prompt_lookup_num_tokens": prompt_lookup} if prompt_lookup else {}
        self._calls = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def answer(self, request: dict[str, Any]) -> Reply:
        """Greedy. Lookup takes one sequence at a time; plain decoding as many as there are streams."""
        import torch

        prompts = request["prompts"]
        groups = [prompts[at : at + self._size] for at in range(0, len(prompts), self._size)]
        self._calls = 0
        begun = time.perf_counter()
        with torch.inference_mode():
            answers = [each for group in groups for each in self._group(group, request)]
        wall_s = time.perf_counter() - begun
        return {"answers": answers, "wall_s": wall_s, "passes": self._calls - len(groups)}

    def _group(self, prompts: list[list[int]], request: dict[str, Any]) -> list[Reply]:
        import torch

        width, stop_ids = max(map(len, prompts)), request["stop_ids"]
        ids = torch.tensor([[stop_ids[0]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stamps = Stamps() if len(prompts) == 1 else None
        begun = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=request["max_tokens"],
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            streamer=stamps,
            **self._extra,
        )
        first = {} if stamps is None else {"first_s": stamps.times[1] - begun}
        return [{"tokens": cut(row[width:].tolist(), stop_ids), **first} for row in out]


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """The folder's weights in bfloat16, transformers' default attention."""
    import torch
    import transformers

    torch.set_num_threads(start["threads"])
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(start["model"], dtype=torch.bfloat16).eval()
    decoder = Decoder(model, start["options"]["prompt_lookup"], start["streams"])
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    return decoder.answer, {"versions": about}


if __name__ == "__main__":
    serve(load)
