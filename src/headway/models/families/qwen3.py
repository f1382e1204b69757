"""Qwen3: every query and key head is normalized before it is rotated."""

from headway.models.families.family import Family

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    outer={"Qwen3VLForConditionalGeneration": "qwen3_vl_text"},
    gguf="qwen3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    window="layers",
    head_dim=128,
    kv_heads=32,
)
