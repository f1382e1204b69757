"""Mistral: Llama with a sliding window on every layer. Its GGUF files call themselves llama."""

from headway.models.families.family import Family

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    outer={"Mistral3ForConditionalGeneration": "mistral"},
    gguf=None,
    window="all",
    kv_heads=8,
)
