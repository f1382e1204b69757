"""Qwen2 and Qwen2.5: biases on q, k and v, and a sliding window on the layers that the config names."""

from headway.models.families.family import Family

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    outer={"Qwen2VLForConditionalGeneration": "qwen2_vl_text", "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text"},
    gguf="qwen2",
    qkv_bias=True,
    window="layers",
    kv_heads=32,
)
