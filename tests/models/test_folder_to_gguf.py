"""GGUF files that are made of folders: tensors and keys as the tests' own writer has them, logits, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import headway as hw
from headway.models.files.weights import GgufWeights, open_weights
from headway.models.quantized.write import quantize_model
from headway.text.gguf_metadata import gguf_metadata
from headway.text.gguf_vocab import PRE_TOKENIZERS
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_deepseek import FILES, write_deepseek
from support.gguf_families import write_family
from support.gguf_recurrent import recurrent_model, write_recurrent
from support.hf import build_hf, random_hf, save_hf
from support.hf_families import family_model
from support.tokenizer_folders import byte_level, pieces

QUICK = ("gemma3-pattern", "phi3", "granite-moe", "llama4-published")
SLOW = (
    *("phi", "olmo3"),
    *("gemma", "gemma2-head-scale", "phi3-partial", "olmo2", "smollm3-every-fourth", "granite", "cohere2-pattern"),
    *("stablelm", "stablelm-parallel-normed", "gpt2", "gpt-neox", "gpt-neox-serial", "falcon", "falcon-new"),
    *("falcon-new-one-norm", "starcoder2", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"),
)
RECURRENT = ("lfm2", "qwen3.5", "qwen3.5-moe", "qwen3-next-plain", "mamba2", "granite-hybrid", "granite-hybrid-dense")
BY_LAYER = ("gemma4", "gemma4-experts", "gemma4-even", "gemma3n-published")
CASES = [*QUICK, *RECURRENT[:2], "deepseek-v3-yarn", *BY_LAYER[:1]]
MORE = (*SLOW, *RECURRENT[2:], *FILES, *BY_LAYER[1:])
CASES += [pytest.param(name, marks=pytest.mark.slow) for name in MORE if name not in CASES]
# What the converter says and no layer has, or what it does not say of a folder.
UNSAID = {"qwen35moe.feed_forward_length", "mamba2.context_length"}


def converted(name: str, tmp_path: Path) -> tuple[Path, Any, Path]:
    """A folder, its model, and the file that the converter makes of it."""
    if name in RECURRENT:
        model, write = recurrent_model(name), write_recurrent
    elif name in FILES:
        kind, config = FILES[name]
        model, write = build_hf(f"{kind}Config", f"{kind}ForCausalLM", config, 3)[1], write_deepseek
    else:
        model, write = family_model(name, seed=3)[1], write_family
    folder = save_hf(tmp_path, model)
    return folder, model, write(tmp_path / "m.gguf", folder, model)


def plain(value: Any) -> Any:
    """A value of metadata; of a list that has one for every layer, and the same, that."""
    return value[0] if isinstance(value, list) and len({*value}) == 1 else value


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_tensors_and_keys_of_the_converter(name: str, tmp_path: Path) -> None:
    folder, model, theirs_path = converted(name, tmp_path)
    tokens = random_tokens(97, 24)
    quantize_model(folder, "F32", tmp_path / "out.gguf")
    with open_weights(tmp_path / "out.gguf") as ours, open_weights(theirs_path) as theirs:
        assert isinstance(ours, GgufWeights)
        assert isinstance(theirs, GgufWeights)
        assert set(ours.names()) == set(theirs.names())
        for tensor in theirs.names():
            near = 1e-6 if tensor.endswith(("rope_freqs.weight", "ssm_a")) else 0  # computed on either side
            np.testing.assert_allclose(ours.array(tensor).ravel(), theirs.array(tensor).ravel(), near, err_msg=tensor)
        for key, value in theirs.file.metadata.items():
            assert key in UNSAID or plain(ours.file.metadata[key]) == pytest.approx(plain(value)), key
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


# Relative errors (root mean square) of matrices in a file.
ERRORS = {"F32": 0.0, "BF16": 0.002, "Q8_0": 0.006, "Q6_K": 0.02, "Q4_K_M": 0.08}


@pytest.mark.parametrize("to", ERRORS)
def test_every_tensor_of_a_quantized_file_is_near_the_folders(to: str, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    _, model = random_hf("llama", 2, rope_parameters=rope, **sizes)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 24)
    quantize_model(folder, "F32", tmp_path / "exact.gguf")
    quantize_model(folder, to, tmp_path / "out.gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == to.removesuffix("_M")
    assert kinds["rope_freqs.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    with open_weights(tmp_path / "exact.gguf") as exact, open_weights(tmp_path / "out.gguf") as found:
        for name in exact.names():
            wanted, error = exact.array(name), found.array(name) - exact.array(name)
            assert np.sqrt(np.square(error).mean()) <= ERRORS[to] * np.sqrt(np.square(wanted).mean()), name
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        logits = all_logits(engine, tokens)
    if to == "F32":
        assert_close(logits, reference_logits(model, tokens))


@pytest.mark.parametrize("rows", [90, 110])
def test_a_table_of_inputs_has_a_row_for_every_token(rows: int, tmp_path: Path) -> None:
    _, model = family_model("gemma3n-published", seed=3, vocab_size_per_layer_input=rows)
    tokens = [*random_tokens(97, 20), 90, 96]
    quantize_model(save_hf(tmp_path, model), "F32", tmp_path / "out.gguf")
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens), tolerance=1e-3)


@pytest.mark.parametrize(
    ("name", "kept", "quantized"),
    [
        ("lfm2", {"shortconv.conv"}, {"shortconv.in_proj", "shortconv.out_proj", "ffn_up"}),
        ("mamba2", {"ssm_conv1d"}, {"ssm_in", "ssm_out"}),
        ("qwen3.5", {"ssm_conv1d", "ssm_alpha", "ssm_beta"}, {"attn_qkv", "attn_gate", "ssm_out"}),
    ],
)
def test_matrices_of_recurrent_layers_are_quantized(
    name: str, kept: set[str], quantized: set[str], tmp_path: Path
) -> None:
    sizes = {"linear_value_head_dim": 16, "linear_key_head_dim": 16} if name == "qwen3.5" else {}
    model, tokens = recurrent_model(name, **sizes), random_tokens(97, 24)
    quantize_model(save_hf(tmp_path, model), "Q8_0", tmp_path / "out.gguf")
    tensors = gguf.GGUFReader(tmp_path / "out.gguf").tensors
    kinds = {t.name.removeprefix("blk.0.").removesuffix(".weight"): t.tensor_type.name for t in tensors}
    assert {kinds[each] for each in kept} == {"F32"}
    assert {kinds[each] for each in quantized} == {"Q8_0"}
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        assert np.corrcoef(all_logits(engine, tokens).ravel(), reference_logits(model, tokens).ravel())[0, 1] > 0.99


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_a_file_brings_its_tokenizer_and_template(pre: str, tmp_path: Path) -> None:
    _, model = random_hf("qwen2", 1, vocab_size=330)
    folder = save_hf(tmp_path, model)
    tokenizer = byte_level(folder, pre)
    metadata = gguf_metadata(folder, 330)
    assert PRE_TOKENIZERS[str(metadata["tokenizer.ggml.pre"])] == PRE_TOKENIZERS[pre]
    quantize_model(folder, "Q8_0", tmp_path / "out.gguf", vocabulary=metadata)
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        for text in ("def test(): 12345", "Ünïcödé 🙂 it's\n\n  IT'S", "a <tool> b", "e\u0301"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert engine.tokenizer.encode(text) == ids, text
            assert engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}!"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.token_to_id("</s>")
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 330


@pytest.mark.parametrize("prefix", [True, False])
def test_a_file_brings_a_sentencepiece_tokenizer(prefix: bool, tmp_path: Path) -> None:
    _, model = random_hf("llama", 1, vocab_size=420)
    folder = save_hf(tmp_path, model)
    tokenizer, own = pieces(folder, prefix=prefix)
    metadata = gguf_metadata(folder, 420)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    quantize_model(folder, "F32", tmp_path / "out.gguf", vocabulary=metadata)
    bare = {key: value for key, value in metadata.items() if not key.endswith("merges")}
    quantize_model(folder, "F32", tmp_path / "bare.gguf", vocabulary=bare)  # as llama.cpp reads it: by scores alone
    for path in (tmp_path / "out.gguf", tmp_path / "bare.gguf"):
        with hw.Engine(path, pages=8, threads=1) as engine:
            for text in ("def test(): 12345", "Ünïcödé 🙂 it's\n\n  IT'S", "a <tool> b", "  \t x"):
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                assert engine.tokenizer.encode(text) == ids, text
                assert engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
                if "<" not in text:
                    assert own.encode(text) == ids, text
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:4] == [2, 3, 3, 4]  # unknown, control, control, user-defined
    assert kinds[own.piece_to_id("<0x0A>")] == 6
    scores, merged = fields["tokenizer.ggml.scores"].contents(), range(300, 420)
    pairs = [i for i in merged if len(own.id_to_piece(i)) > 1]
    assert sorted(pairs, key=lambda i: -scores[i]) == sorted(pairs, key=lambda i: -own.get_score(i))
    assert fields["tokenizer.ggml.add_bos_token"].contents()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_merges_that_no_scores_say_are_kept_as_gemma_4_has_them(adds_bos: bool, tmp_path: Path) -> None:
    _, model = random_hf("llama", 1, vocab_size=420)
    folder = save_hf(tmp_path, model)
    pieces(folder, prefix=False)
    data = json.loads((folder / "tokenizer.json").read_text())
    made = ["".join(pair) for pair in data["model"]["merges"]]
    merges = data["model"]["merges"]
    merges.append(merges.pop(next(i for i, text in enumerate(made) if made.count(text) > 1)))
    (folder / "tokenizer.json").write_text(json.dumps(data))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": adds_bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not adds_bos:
        with pytest.raises(hw.Unsupported, match="not in the order"):
            gguf_metadata(folder, 420)
        return
    metadata, tokenizer = gguf_metadata(folder, 420), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    quantize_model(folder, "F32", tmp_path / "out.gguf", vocabulary=metadata)
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        assert engine.tokenizer.add_bos
        for text in (Path(__file__).read_text()[:3000], "Ünïcödé 🙂 it's\n\n  IT'S", "a <tool> b", "  \t x"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert engine.tokenizer.encode(text) == ids, text
            assert engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("first", "prepend_scheme always or never"),
        ("lower", "a normalizer that is .*Lowercase"),
        ("strip", "a decoder that is"),
        ("less", "merges that are not all ways to make each token, such as"),
        ("order", "merges that are not in the order of the tokens that they make"),
        ("unigram", "nor SentencePiece BPE"),
    ],
)
def test_a_sentencepiece_tokenizer_that_a_file_cannot_say_is_refused(change: str, message: str, tmp_path: Path) -> None:
    pieces(tmp_path, prefix=True)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = data["model"]["merges"]
    match change:
        case "first":
            data["normalizer"] = None
            data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        case "lower":
            data["normalizer"]["normalizers"].append({"type": "Lowercase"})
        case "strip":
            data["decoder"]["decoders"].pop()
        case "less":
            del merges[5]
        case "order":
            made = ["".join(pair) for pair in merges]
            merges.append(merges.pop(next(i for i, text in enumerate(made) if made.count(text) > 1)))
        case "unigram":
            data["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(hw.Unsupported, match=message):
        gguf_metadata(tmp_path, 420)


def test_what_a_file_cannot_say_is_refused_by_name(tmp_path: Path) -> None:
    _, model = family_model("gemma2-head-scale", seed=3, query_pre_attn_scalar=99)
    with pytest.raises(hw.HeadwayError, match="gemma2 family cannot say that attention_scale is"):
        quantize_model(save_hf(tmp_path, model), "Q8_0", tmp_path / "out.gguf")
    _, model = family_model("deepseek-v3", seed=3)  # yarn that scales the rotation too
    with pytest.raises(hw.HeadwayError, match="family cannot say that rope is"):
        quantize_model(save_hf(tmp_path, model), "Q8_0", tmp_path / "out.gguf")
    folder = tmp_path / "words"
    folder.mkdir()
    words = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    words.save(str(folder / "tokenizer.json"))
    with pytest.raises(hw.HeadwayError, match="is not byte-level BPE"):
        gguf_metadata(folder, 97)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "words"}
