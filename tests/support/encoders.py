"""Small random encoders of several architectures with tokenizers of their own, for the pipelines' tests."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("the", "film", "was", "great", "dull", "paris", "london", "anna", "works", "at", "in", "of", "a", "bank")
LIMIT = 64  # positions of every model here
FAMILIES = ("bert", "roberta", "distilbert", "modernbert", "deberta")
HEADS = {
    "base": "Model",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "fill": "ForMaskedLM",
    "answer": "ForQuestionAnswering",
}
PREFIX = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
    "deberta": "DebertaV2",
    "electra": "Electra",
}


@cache
def tokenizer(family: str) -> Any:
    """WordPiece for the BERT family, byte-level BPE for RoBERTa and ModernBERT."""
    return _byte_level() if family in ("roberta", "modernbert") else _word_piece(types=family in ("bert", "deberta"))


def _word_piece(*, types: bool) -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS), *".,!?'-", *"0123456789"]
    made = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=LIMIT,
        model_input_names=names,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _byte_level() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([f"{word} {word}" for word in WORDS], trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=LIMIT,
        model_input_names=["input_ids", "attention_mask"],
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def config(family: str, **more: Any) -> Any:
    """A two-layer shape of the family, with labels if `more` has them."""
    words = tokenizer(family)
    shape: dict[str, Any] = {"vocab_size": len(words), "pad_token_id": words.pad_token_id}
    if family == "distilbert":
        shape |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": LIMIT}
    else:
        shape |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        # RoBERTa counts positions from after the padding token
        shape |= {"max_position_embeddings": LIMIT + (words.pad_token_id + 1 if family == "roberta" else 0)}
    match family:
        case "modernbert":
            shape |= {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2}
            shape |= {"bos_token_id": 0, "eos_token_id": 2, "attn_implementation": "sdpa"}
        case "deberta":
            shape |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
            shape |= {"type_vocab_size": 2, "pooler_hidden_size": 32}
        case "roberta":
            shape |= {"type_vocab_size": 1}
        case "electra":
            shape |= {"embedding_size": 16}
    return getattr(transformers, f"{PREFIX[family]}Config")(**shape, **more)


def model(family: str, head: str, *, seed: int = 0, **more: Any) -> Any:
    """A random model with weights large enough that inputs matter."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{PREFIX[family]}{HEADS[head]}")(config(family, **more)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
    return made


def texts(count: int, *, seed: int = 0, most: int = 10) -> list[str]:
    """Sentences of 1 to `most` words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]
