"""Fields of OpenAI's and vLLM's requests that this server knows and does not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["REFUSED"]

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "use n"),
    "echo": ((False,), "put the prompt in front yourself"),
    "suffix": (("",), "this model fills no gaps"),
    "use_beam_search": ((False,), "use n and sampling"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "prompt_logprobs": ((), "use logprobs, which are those of the output"),
    "allowed_token_ids": ((), "use structured_outputs or logit_bias"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the output"),
    "skip_special_tokens": ((True,), "special tokens are never part of the text; use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of the text"),
    "continue_final_message": ((False,), "use /v1/completions to continue a text"),
    "chat_template": ((), "the server uses the model's own template"),
    "chat_template_kwargs": (({},), "the server uses the model's own template"),
    "documents": (([],), "write them into a message"),
    "functions": ((), "use tools"),
    "function_call": ((), "use tool_choice"),
    "modalities": ((["text"],), "this model writes text"),
    "audio": ((), "this model writes text"),
    "reasoning_effort": (("none",), "this model has no levels of reasoning"),
    "verbosity": ((), "say it in a message"),
    "web_search_options": ((), "this server searches nothing"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "this server stores nothing"),
    "priority": ((0,), "requests are served in the order of their arrival"),
    "prompt_cache_retention": (("in-memory", "in_memory"), "prefixes are kept in memory, as long as there is room"),
    "cache_salt": ((), "caches are separate for each API key"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "request_id": ((), "send the header X-Request-Id"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "typical_p": ((1, 1.0), "use min_p"),
    "max_new_tokens": ((), "use max_tokens"),
}
"""By name: values beside null that pass since they change nothing, and what to do instead of giving another."""
