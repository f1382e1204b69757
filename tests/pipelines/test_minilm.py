"""The real embedding model, beside sentence-transformers; and text generation on the real decoder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from headway.models.hub.registry import MINILM
from headway.models.hub.store import resolve

TEXTS = [
    "A man is playing the guitar.",
    "Someone makes music on a street.",
    "",
    "Quarterly earnings fell by three percent, said the bank on Tuesday; shares did not move.",
    "Ein Satz auf Deutsch mit Umlauten: äöü, ß.",
    "日本語のテキスト",
    " ".join(["word"] * 200),
    "🙂 !!! \t\n",
]


@pytest.fixture(scope="module")
def minilm() -> Iterator[hw.Pipeline]:
    with hw.pipeline("sentence-embedding", device="cpu") as p:
        yield p


def test_the_name_is_a_folder_of_pinned_files() -> None:
    folder = resolve("minilm")
    assert folder.is_dir()
    assert all((folder / pinned.file).stat().st_size == pinned.bytes for pinned in (MINILM, *MINILM.extra_files))
    assert not list(folder.glob("*.py"))


def test_vectors_are_those_of_sentence_transformers(minilm: hw.Pipeline) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    peer = sentence_transformers.SentenceTransformer(str(resolve("minilm")), device="cpu")
    want = peer.encode(TEXTS)
    got = np.stack(minilm(TEXTS))
    assert ((got * want).sum(1) > 0.9999).all()
    np.testing.assert_allclose(got, want, atol=1e-5)
    long = " ".join(["word"] * 400)
    np.testing.assert_allclose(minilm(long, truncation=True), peer.encode(long), atol=1e-5)
    with pytest.raises(hw.InvalidInput, match="the limit is 256"):
        minilm(long)


def test_similar_sentences_are_similar() -> None:
    with hw.pipeline("sentence-similarity", device="cpu") as p:
        near, far = p(source_sentence="A dog runs in the park.", sentences=["A puppy runs outside.", "Stocks fell."])
    assert near > 0.5
    assert far < 0.2


def test_int8_vectors_are_near(minilm: hw.Pipeline) -> None:
    with hw.pipeline("sentence-embedding", device="cpu", quantize="int8") as p:
        got, want = np.stack(p(TEXTS)), np.stack(minilm(TEXTS))
        assert ((got * want).sum(1) > 0.97).all()
        assert p.quantization.layers == 36


class TestGeneration:
    def test_texts_chats_lists_streams_and_submit(self, smollm2: hw.Engine) -> None:
        with hw.pipeline("text-generation", smollm2, max_new_tokens=4, do_sample=False) as p:
            [one] = p("The capital of France is")
            assert one["generated_text"].startswith("The capital of France is Paris")
            [only] = p("The capital of France is", return_full_text=False)
            assert "The capital of France is" + only["generated_text"] == one["generated_text"]
            assert p(["The capital of France is"] * 3) == [[one]] * 3
            assert list(p(iter(["The capital of France is"]))) == [[one]]
            assert asyncio.run(p.submit("The capital of France is")) == [one]
            chat = [{"role": "user", "content": "Say hi."}]
            [answer] = p(chat)
            assert answer["generated_text"][:1] == chat
            assert answer["generated_text"][1]["role"] == "assistant"
            assert answer["generated_text"][1]["content"]
        assert smollm2.stats().pages_held == 0 or smollm2.backend(still_works) > 0  # the caller's engine stays open

    def test_draws_are_those_of_their_seed(self, smollm2: hw.Engine) -> None:
        with hw.pipeline("text-generation", smollm2, max_new_tokens=5) as p:
            asked = {"do_sample": True, "temperature": 1.0, "num_return_sequences": 3, "seed": 7}
            first, again = p("Once upon a time", **asked), p("Once upon a time", **asked)
            assert first == again
            assert len({one["generated_text"] for one in first}) > 1

    def test_bad_input(self, smollm2: hw.Engine) -> None:
        with hw.pipeline("text-generation", smollm2) as p:
            for bad, words in ((None, "a text or a chat"), ("", "empty text"), ([{"role": "x"}], "not a message")):
                with pytest.raises(hw.HeadwayError, match=words):
                    p(bad, max_new_tokens=2)
            with pytest.raises(hw.WrongType, match="item 1:"):
                p(["One", None], max_new_tokens=2)
            with pytest.raises(hw.InvalidInput, match="'colour' is not an option"):
                p("One", colour=1)
            kept = p(["One", None], max_new_tokens=2, on_error="return")
            assert isinstance(kept[1], hw.WrongType)
        with pytest.raises(hw.InvalidInput, match="batch_size is 0; it must be an integer of at least 1"):
            hw.pipeline("text-generation", smollm2, batch_size=0)
        with pytest.raises(hw.Unsupported, match="takes no compile"):
            hw.pipeline("text-generation", smollm2, compile=True)
        with pytest.raises(hw.Closed):
            p("One")

    def test_an_engine_of_its_own_is_closed_with_it(self, smollm2_path: Path) -> None:
        with hw.pipeline("text-generation", smollm2_path, max_new_tokens=2) as p:
            engine = p.engine  # type: ignore[attr-defined]
            p("One")
        with pytest.raises(hw.Closed):
            engine.context()


async def still_works(engine: hw.Engine) -> int:
    async with engine.context() as ctx:
        return len(await ctx.fill("One").generate(hw.Argmax(), max_tokens=2).tokens())
