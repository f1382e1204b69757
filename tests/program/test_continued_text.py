"""The text of a generation goes on where the prompt's text ends, for tokenizers that strip a leading space."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

import headway as hw
from headway.program.chat.reader import ReplyReader
from headway.program.generation.sequences.beams import decoded
from headway.server.api.tokens import TokenStream
from headway.testing import ScriptedRunner
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf
from support.live import Live, live

WORDS = ["▁Once", "▁upon", "▁a", "▁time"]
CHARACTERS = sorted(set("".join(WORDS)))
PIECES = [word[:end] for word in WORDS for end in range(2, len(word) + 1)]
TOKENS = list(dict.fromkeys(["<unk>", "<s>", "</s>", *CHARACTERS, *PIECES]))
TEMPLATE = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endfor %}"


def _model() -> Any:
    """Whose layers do nothing and whose head writes the words in order, and the second after anything else."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": len(TOKENS)}
    model = random_hf("llama", 0, **sizes)[1]
    state: dict[str, torch.Tensor] = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    for name, one in state.items():
        one.fill_(1.0 if "norm" in name else 0.0)
    state["model.embed_tokens.weight"].fill_diagonal_(1.0)
    words = [TOKENS.index(word) for word in WORDS]
    follows = dict(pairwise(words)) | {words[-1]: TOKENS.index("</s>")}
    for id in range(len(TOKENS)):
        state["lm_head.weight"][follows.get(id, words[1]), id] = 10.0
    model.load_state_dict(state)
    return model


def _folder(path: Path) -> Path:
    """A folder whose tokenizer.json is laid out as Llama 2's."""
    merges = [(piece[:-1], piece[-1]) for piece in PIECES]
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    backend = Backend(models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)  # pyright: ignore
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    folder = save_hf(path, _model())
    backend.save(str(folder / "tokenizer.json"))
    config = '{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}'
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _file(path: Path) -> Path:
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
        writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(True)
        writer.add_chat_template(TEMPLATE)

    return write_gguf(path, _model(), metadata=tokenizer)


@pytest.fixture(scope="module", params=["folder", "gguf"])
def engine(request, tmp_path_factory):
    at = tmp_path_factory.mktemp("spm")
    path = _folder(at / "hf") if request.param == "folder" else _file(at / "model.gguf")
    with hw.Engine(path, runner=ScriptedRunner(len(TOKENS), 16), threads=1, pages=100) as made:
        yield made


def ids(text: str) -> list[int]:
    return [TOKENS.index(piece) for piece in text.split()]


TIME = ids("▁upon ▁a ▁time")


def test_a_continuation_keeps_the_space_after_the_prompt(engine):
    with engine.context() as ctx:
        ctx.fill("Once")
        assert list(ctx.tokens) == [1, *ids("▁Once")]
        generation = ctx.generate(max_tokens=9)
        assert generation.accept(TIME[:1]).text == " upon"
        assert generation.accept(TIME[1:]).text == " a time"
        assert decoded(engine, TIME, [1, *ids("▁Once")]) == " upon a time"  # of beams


def test_the_space_is_stripped_where_the_text_begins(engine):
    with engine.context() as ctx:
        ctx.fill([1])
        assert ctx.generate(max_tokens=9).accept(TIME).text == "upon a time"


def test_the_space_stays_after_tokens_of_the_program_and_after_cuts(engine):
    with engine.context() as ctx:
        ctx.fill([1])
        generation = ctx.generate(max_tokens=20)
        assert generation.accept(TIME[:1]).text == "upon"
        ctx.fill(ids("▁Once"))
        assert generation.accept(TIME[1:]).text == " a time"
        ctx.truncate(1)
        step = generation.accept(TIME[:1])
        assert (step.text, step.retracted) == (" upon", 5)


def test_a_second_generation_goes_on_after_the_first(engine):
    with engine.context() as ctx:
        ctx.fill([1])
        assert ctx.generate(max_tokens=9).accept(TIME[:1]).text == "upon"
        assert ctx.generate(max_tokens=9).accept(TIME[1:]).text == " a time"


def test_a_message_is_a_text_of_its_own(engine):
    with engine.context() as ctx:
        ctx.user("a").cue()
        assert ctx.generate(max_tokens=9).accept(TIME[:1]).text == "upon"
        assert ctx.generate(max_tokens=9).accept(TIME[1:]).text == " a time"


@pytest.mark.parametrize("format", [None, "hermes"])
def test_the_content_of_a_reply_has_no_leading_space(engine, format):
    """Also where a prompt was filled in as ids, so that the generation does not know of the message."""
    with engine.context() as ctx:
        ctx.fill(ids("▁Once"))
        generation, reader = ctx.generate(max_tokens=9), ReplyReader(engine.tokenizer, format)
        reader.begin(ctx.text_before)
        reader.push(generation.accept(TIME[:1]))
        reader.push(generation.accept([*TIME[1:], 2]))
        reader.finish()
        assert reader.reply.content == "upon a time"


def test_offsets_of_streamed_tokens_count_the_space(engine):
    with engine.context() as ctx:
        ctx.fill("Once")
        generation, stream = ctx.generate(max_tokens=9), TokenStream(engine, ctx.text_before, len("Once"))
        tokens = stream.push(generation.accept(TIME), len(TIME))
        assert [token.offset for token in tokens] == [4, 9, 11]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = _folder(tmp_path_factory.mktemp("served") / "hf")
    with live(hw.Engine(path, device="cpu", threads=1, pages=100), model="words") as server:
        yield server


def test_a_server_continues_texts_with_their_space_and_begins_messages_without(served):
    greedy: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
    for fields in ({}, {"skip_special_tokens": False}, {"prompt": [1, *ids("▁Once")]}):
        assert served.complete(**{"prompt": "Once", **greedy, **fields})["choices"][0]["text"] == " upon a time"
    options = {"num_predict": 3, "temperature": 0}
    raw = {"model": "words", "raw": True, "stream": False, "options": options}
    assert served.post("/api/generate", prompt="Once", **raw).json["response"] == " upon a time"
    chat: list[Any] = [{"role": "user", "content": "a"}]
    assert served.chat(chat, **greedy)["choices"][0]["message"]["content"] == "upon a time"
    begun = [*chat, {"role": "assistant", "content": "Once"}]
    for fields in ({}, {"skip_special_tokens": False}):
        last = {"continue_final_message": True, "add_generation_prompt": False, **fields, **greedy}
        assert served.chat(begun, **last)["choices"][0]["message"]["content"] == " upon a time"
    message = served.post("/v1/messages", model="words", messages=begun, **greedy).json
    assert message["content"][0]["text"] == " upon a time"
