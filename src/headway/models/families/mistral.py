"""Mistral: Llama with a sliding window on every layer, or on those that are listed (Ministral). Its GGUF files call
themselves llama."""

from headway.models.families.family import Family

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("mistral", "ministral"),
    outer={"Mistral3ForConditionalGeneration": "mistral"},
    gguf=None,
    window="all",
    kv_heads=8,
)
