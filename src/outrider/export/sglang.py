"""SGLang's reading of the layout: ``LlamaForCausalLMEagle3`` (``srt/models/llama_eagle3.py`` of its source).

Its tap i is the residual stream *behind* layer i, one less than our index; it looks at every layer's input only, so the
last layer's output cannot be tapped. The list is read inside ``eagle_config``. Tensors that it does not know, or does not
find, pass without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.drafters.eagle_config import EagleConfig
from outrider.export.engines import Engine, shared_refusals

__all__ = ["SGLANG"]


def _refusals(config: EagleConfig, num_target_layers: int, has_embedding: bool) -> Iterator[str]:
    yield from shared_refusals(config, num_target_layers)
    if config.tap_layers[0] == 0:
        yield "tap_layers holds 0; allowed: 1 or more, since this engine counts the layers behind which it taps"
    if num_target_layers in config.tap_layers:
        yield (
            f"tap_layers holds {num_target_layers}, the last layer's output; this engine taps inputs of layers only, "
            f"allowed: 1 to {num_target_layers - 1}"
        )
    if config.norm_before_residual:
        yield "norm_before_residual is true; allowed: false, since this engine does not know it"
    if config.num_layers > 1:
        yield f"num_layers is {config.num_layers}; allowed: 1, since this engine norms further layers' inputs otherwise"
    if config.num_taps * config.target_hidden_size == config.hidden_size:
        yield "the taps are together as wide as the head; this engine would take them for the head's own output"
    if has_embedding and config.hidden_size == config.target_hidden_size:
        yield "the head brings an embedding of its own; this engine would put the target's in its place"
    if config.hidden_size != config.target_hidden_size and not has_embedding:
        yield "hidden_size is not the target's, and the head brings no embedding"


SGLANG = Engine(
    name="sglang",
    version="0.5.23",
    was_run=False,
    tap_shift=-1,
    ignored={
        "attention_bias": "a head's q, k and v never have biases",
        "mlp_bias": "a head's feed-forward never has biases",
        "eagle_aux_hidden_state_layer_ids": "taps are read inside eagle_config",
        "norm_before_residual": "not known: the feature itself is the residual",
        "torch_dtype": "a head runs in the precision that the server is given",
    },
    effects={
        "architectures": "chooses the class",
        "bias": "bias of the fusing matrix",
        "tie_word_embeddings": "true would put the embedding in the LM head's place",
        "max_position_embeddings": "size of the rotary table; attention is not cut to it",
        "eagle_config.eagle_aux_hidden_state_layer_ids": "taps: residual stream behind layer i",
        "norm_before_fc": "tensor input_norm.weight",
        "fc_norm": "tensors fc_norm.0.weight and so on",
        "norm_output": "the normed output stands in for the next feature",
    },
    refusals=_refusals,
    drops_full_vocabulary=False,
)
