"""vLLM's reading of the layout: ``Eagle3LlamaForCausalLM`` (``model_executor/models/llama_eagle3.py`` of its source).

Its tap i is the residual stream before layer i, un-normed, and the number of layers is the last one's output: our own
numbering (``EagleModelMixin._maybe_add_hidden_state`` is called with 0 before the first layer and with i + 1 behind layer i).
It sorts the list. Of the two model runners one reads the list at the top level only, and the width of the fusing matrix
comes from ``num_aux_hidden_states`` or from the list inside ``eagle_config``; so the list is written in both places.

It does not notice a missing tensor: what it does not find it leaves as allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.drafters.eagle_config import EagleConfig
from outrider.export.engines import Engine, shared_refusals

__all__ = ["VLLM"]


def _refusals(config: EagleConfig, num_target_layers: int, has_embedding: bool) -> Iterator[str]:
    yield from shared_refusals(config, num_target_layers)
    if config.fc_bias:
        yield "fc_bias is true; allowed: false, since this engine's fusing matrix has no bias"
    if config.hidden_size != config.target_hidden_size and not has_embedding:
        yield "hidden_size is not the target's, and the head brings no embedding; this engine would share the target's"


VLLM = Engine(
    name="vllm",
    version="0.32.0",
    was_run=True,
    tap_shift=0,
    ignored={
        "bias": "its fusing matrix never has one",
        "tie_word_embeddings": "lm_head.weight of the head is always its own",
        "torch_dtype": "a head runs in the target's precision",
    },
    effects={
        "architectures": "chooses the class Eagle3LlamaForCausalLM",
        "model_type": "how the rest of the file is read",
        "max_position_embeddings": "size of the rotary table, raised to the window; attention is not cut to it",
        "vocab_size": "width of the logits that draft ids are scattered into, rows of the embedding",
        "attention_bias": "biases of q, k and v",
        "eagle_aux_hidden_state_layer_ids": "taps: residual stream before layer i",
        "eagle_config.eagle_aux_hidden_state_layer_ids": "number of taps where num_aux_hidden_states is missing",
        "eagle_config.norm_before_fc": "goes before the key of the same name outside",
        "norm_before_residual": "false if missing",
        "norm_before_fc": "tensor input_norm.weight",
        "fc_norm": "tensors fc_norm.0.weight and so on",
        "norm_output": "the normed output stands in for the next feature",
    },
    refusals=_refusals,
    drops_full_vocabulary=True,
)
