"""Layouts of KerasHub's decoders: GPT-2, Llama, Mistral, Qwen, Phi-3, Gemma, and what is built of their layers."""

from hvdtrain.parallel.tensor.rules import AXIS, Rules

NAME = "keras_hub"
"""In place of rules: those below that a model has variables for."""
DECODERS: Rules = {
    r"transformer_layer_\d+/(self_)?attention/(query|key|value)/kernel": (None, AXIS, None),
    r"decoder_block_\d+/attention/(query|key|value)/kernel": (AXIS, None, None),  # Gemma's heads come first
    r"attention/attention_output/kernel": (AXIS, None, None),
    r"feedforward_(intermediate|gate)_dense/kernel": (None, AXIS),
    r"ffw_gating(_2)?/kernel": (None, AXIS),
    r"(feedforward_output_dense|ffw_linear)/kernel": (AXIS, None),
    r"token_embedding/embeddings": (AXIS, None),
    r"token_embedding/reverse_embeddings": (None, AXIS),
}
