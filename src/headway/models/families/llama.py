"""Llama 2, 3 and 3.x, and everything published under the same architecture (SmolLM2, TinyLlama, …)."""

from headway.models.families.family import Family

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    outer={"LlavaForConditionalGeneration": "llama"},
    gguf="llama",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    interleaved_gguf=True,
)
