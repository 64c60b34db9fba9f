"""KerasHub's decoders with few weights that are drawn, and what becomes of them on several ranks."""

from collections.abc import Callable
from typing import Any

import keras
import keras_hub

models = keras_hub.models
LENGTH, VOCABULARY = 6, 32
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
GROUPED = {**SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "top_k": 2}
SMOL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, False],
    "layer_types": ["full_attention"] * 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 32,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
}
SOFT_CAPS = {
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4,
}
BACKBONES: dict[str, Callable[[], Any]] = {
    "Bloom": lambda: models.BloomBackbone(num_heads=4, **SIZES),
    "Falcon": lambda: models.FalconBackbone(num_attention_heads=4, **SIZES),
    "GPT2": lambda: models.GPT2Backbone(num_heads=4, max_sequence_length=LENGTH, dropout=0.0, **SIZES),
    "GPTNeoX": lambda: models.GPTNeoXBackbone(num_heads=4, rotary_percentage=0.5, max_sequence_length=LENGTH, **SIZES),
    "Gemma": lambda: models.GemmaBackbone(head_dim=4, **GROUPED),
    "GemmaOneKeyHead": lambda: models.GemmaBackbone(head_dim=4, **{**GROUPED, "num_key_value_heads": 1}),
    "Gemma2": lambda: models.GemmaBackbone(
        head_dim=4, attention_logit_soft_cap=50, final_logit_soft_cap=30, **SOFT_CAPS, **GROUPED
    ),
    "Gemma3": lambda: models.Gemma3Backbone(head_dim=4, image_size=16, vision_encoder=None, **SOFT_CAPS, **GROUPED),
    "GptOss": lambda: models.GptOssBackbone(sliding_window=4, **EXPERTS, **GROUPED),
    "Llama": lambda: models.LlamaBackbone(**GROUPED),
    "Llama3": lambda: models.Llama3Backbone(tie_word_embeddings=True, **GROUPED),
    "Mistral": lambda: models.MistralBackbone(sliding_window=4, **GROUPED),
    "OPT": lambda: models.OPTBackbone(num_heads=4, max_sequence_length=LENGTH, dropout=0.0, **SIZES),
    "Phi3": lambda: models.Phi3Backbone(**GROUPED),
    "Qwen": lambda: models.QwenBackbone(**GROUPED),
    "Qwen2": lambda: models.QwenBackbone(tie_word_embeddings=False, **GROUPED),
    "Qwen3": lambda: models.Qwen3Backbone(head_dim=4, **GROUPED),
    "SmolLM3": lambda: models.SmolLM3Backbone(num_attention_heads=4, num_key_value_heads=2, **SMOL, **SIZES),
}
"""Backbones by the name of their family."""
TASKS = {"Gemma2": "Gemma", "GemmaOneKeyHead": "Gemma"}
"""Names of tasks that are not those of their families."""
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("GemmaOneKeyHead", "tp=2"): (
        "one head of keys and values for all queries",
        "tp=2 does not divide the features of 'decoder_block_0/attention/key/kernel'",
    ),
    ("GptOss", "tp=2"): ("a weight for each head, which is not divided", "Take sizes such as the number of heads from"),
}
"""Why families are refused along axes, and words of the refusal; all others train as in one process."""
NOT_COMPARED = {
    "BLIP2, PaliGemma, PARSeq": "take images",
    "Gemma3n, Gemma4, Qwen3.5, Qwen3.5Moe, RWKV7": "no small model of them is in the tests yet",
    "Mixtral, QwenMoe, Qwen3Moe": "add a loss of their routers, which compares the tokens of a batch with one another",
}


def task(name: str) -> Any:
    """Return the family's CausalLM."""
    return getattr(models, f"{TASKS.get(name, name)}CausalLM")(backbone=BACKBONES[name](), preprocessor=None)


def backbone_below_own_layers(name: str) -> Any:
    """Return a model of the family's backbone and three layers of the user's own."""
    backbone = BACKBONES[name]()
    hidden = keras.layers.Dense(16, activation="gelu", name="own_hidden")(backbone.outputs[0])
    hidden = keras.layers.LayerNormalization(name="own_norm")(hidden)
    return keras.Model(backbone.input, keras.layers.Dense(VOCABULARY, name="own_logits")(hidden))
