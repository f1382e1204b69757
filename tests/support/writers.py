"""Small random encoder-decoders of several architectures, for the pipelines' tests. They end now and then."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from support.encoders import LETTERS, WORDS

LIMIT = 48  # positions of every model here
PAD, END, UNKNOWN = 0, 1, 2
FAMILIES = ("t5", "bart", "marian")
CLASSES = {"t5": "T5", "bart": "Bart", "marian": "Marian", "mbart": "MBart"}
HEADS = {"t5": "ForConditionalGeneration", "bart": "ForConditionalGeneration", "marian": "MTModel"}


@cache
def tokenizer(**more: Any) -> Any:
    """Words and letters; every text ends with the end token."""
    pieces = ["<pad>", "</s>", "<unk>", *WORDS, *(c for c in LETTERS if c != "a"), *(f"##{c}" for c in LETTERS)]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", END)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=LIMIT,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        **more,
    )


def config(family: str, **more: Any) -> Any:
    """A two-layer shape of the family."""
    shape: dict[str, Any] = {"vocab_size": len(tokenizer()), "pad_token_id": PAD, "eos_token_id": END}
    shape |= {"decoder_start_token_id": PAD, "d_model": 32, "dropout_rate": 0.0}
    if family == "t5":
        shape |= {"d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    else:
        shape |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        shape |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": LIMIT}
        shape |= {"bos_token_id": UNKNOWN, "forced_eos_token_id": None, "scale_embedding": family == "marian"}
    return getattr(transformers, f"{CLASSES[family]}Config")(**shape | more)


def model(family: str, *, seed: int = 0, **more: Any) -> Any:
    """A random model with weights large enough that inputs matter, and an end token that comes up."""
    torch.manual_seed(seed)
    made = getattr(transformers, CLASSES[family] + HEADS[family])(config(family, **more)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1 and "relative" not in name:
                parameter.normal_(0, 0.4 if family == "t5" else 0.25)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
        made.get_output_embeddings().weight[END] *= 1.6
    return made
