"""Vectors, rankings and labels over HTTP: the numbers of the pipelines, in the shapes that clients send and expect."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import headway as hw
from headway.server.pooling import PoolingModels
from headway.server.pooling.response_schema import (
    ClassifyResponse,
    EmbeddingsResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from support import encoders
from support.fuzzing import Fuzzer
from support.live import Live, live
from support.small import small_engine

TEXTS = ["A man is playing the guitar.", "Someone makes music.", "", "Shares fell on Tuesday. " * 12]


@pytest.fixture(scope="module")
def client(served: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def minilm() -> Iterator[hw.Pipeline]:
    with hw.pipeline("sentence-embedding", "minilm", device="cpu") as pipeline:
        yield pipeline


class TestEmbeddings:
    def test_the_openai_client(self, client: openai.OpenAI, minilm: hw.Pipeline) -> None:
        want = np.stack(minilm(TEXTS))
        for request_body in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            result = client.embeddings.create(model="minilm", input=TEXTS, **request_body)  # type: ignore[call-overload]
            assert [one.index for one in result.data] == [0, 1, 2, 3]
            assert result.model == "minilm"
            got: Any = [one.embedding for one in result.data]
            if request_body.get("encoding_format") == "base64":
                got = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in got]
            np.testing.assert_allclose(np.array(got), want, atol=2e-6)
            ids = [minilm.tokenizer(text)["input_ids"] for text in TEXTS]
            assert result.usage.prompt_tokens == result.usage.total_tokens == sum(map(len, ids))

    def test_token_ids_stand_as_they_are(self, client: openai.OpenAI, minilm: hw.Pipeline) -> None:
        ids = [minilm.tokenizer(text)["input_ids"] for text in TEXTS[:2]]
        want = np.stack(minilm(TEXTS[:2]))
        one = client.embeddings.create(model="minilm", input=ids[0])
        np.testing.assert_allclose(one.data[0].embedding, want[0], atol=2e-6)
        both = client.embeddings.create(model="minilm", input=ids)
        np.testing.assert_allclose([part.embedding for part in both.data], want, atol=2e-6)
        assert both.usage.prompt_tokens == len(ids[0]) + len(ids[1])

    def test_the_answer_has_its_shape(self, served: Live) -> None:
        response = served.post("/v1/embeddings", model="minilm", input="hello", user="ada")
        assert response.status == 200
        EmbeddingsResponse.model_validate(response.json, strict=True)

    def test_without_special_tokens(self, served: Live, minilm: hw.Pipeline) -> None:
        plain = served.post("/v1/embeddings", input="hello there", add_special_tokens=False).json
        ids = minilm.tokenizer("hello there", add_special_tokens=False)["input_ids"]
        same = served.post("/v1/embeddings", input=ids).json
        assert plain["data"] == same["data"]
        assert plain["usage"]["prompt_tokens"] == len(ids)

    def test_as_llama_server_has_them(self, served: Live, minilm: hw.Pipeline) -> None:
        want = np.stack(minilm(TEXTS[:2]))
        for path, body in (("/embedding", {"content": TEXTS[:2]}), ("/embeddings", {"input": TEXTS[:2]})):
            listed = served.post(path, **body).json
            assert [one["index"] for one in listed] == [0, 1]
            np.testing.assert_allclose([one["embedding"][0] for one in listed], want, atol=2e-6)
        norms = {0: lambda x: x / np.abs(x).max() * 32760, 1: lambda x: x / np.abs(x).sum()}
        norms[3] = lambda x: x / (np.abs(x) ** 3).sum() ** (1 / 3)
        for kind, norm in norms.items():
            ((found,),) = [
                one["embedding"] for one in served.post("/embedding", content="x y", embd_normalize=kind).json
            ]
            np.testing.assert_allclose(found, norm(minilm("x y")), rtol=1e-4, atol=1e-6)
        for wrong, param in (
            ({"content": "a", "input": "b"}, "content"),
            ({"content": "a", "embd_normalize": -1}, None),
        ):
            assert served.refused("/embedding", **wrong)["param"] == (param or "embd_normalize")
        assert served.refused("/embedding", content=["a", "word " * 400])["param"] == "content"

    def test_many_clients_share_batches(self, served: Live, minilm: hw.Pipeline) -> None:
        texts = encoders.texts(60, seed=1)
        want = np.stack(minilm(texts))
        with ThreadPoolExecutor(30) as crowd:
            result = list(crowd.map(lambda text: served.post("/v1/embeddings", input=text).json, texts))
        got = np.array([one["data"][0]["embedding"] for one in result])
        np.testing.assert_allclose(got, want, atol=2e-6)

    def test_long_texts_are_refused_or_cut_as_asked(self, served: Live, minilm: hw.Pipeline) -> None:
        long = "word " * 400
        error = served.refused("/v1/embeddings", input=["short", long])
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert "402 tokens and the limit is 256" in error["message"]
        assert "truncate_prompt_tokens" in error["message"]
        cut = served.post("/v1/embeddings", input=[long], truncate_prompt_tokens=-1).json
        np.testing.assert_allclose(cut["data"][0]["embedding"], minilm(long, truncation=True), atol=2e-6)
        assert cut["usage"]["prompt_tokens"] == 256

    def test_dimensions_cut_the_vectors_of_a_model_that_was_made_for_it(self, tmp_path: Path) -> None:
        """The first ones, normalized again where whole vectors are; what it was not made for is refused."""
        encoders.model("bert", "base", matryoshka_dimensions=[8, 16]).save_pretrained(tmp_path / "short")
        encoders.tokenizer("bert").save_pretrained(tmp_path / "short")
        pooling = PoolingModels({"embed": str(tmp_path / "short")}, device="cpu")
        with live(small_engine(tmp_path / "model"), pooling) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            (whole,) = client.embeddings.create(model="short", input="the film").data
            (cut,) = client.embeddings.create(model="short", input="the film", dimensions=8).data
            scale = np.linalg.norm(whole.embedding[:8]) if np.isclose(np.linalg.norm(whole.embedding), 1) else 1.0
            np.testing.assert_allclose(cut.embedding, np.array(whole.embedding[:8]) / scale, rtol=1e-5)
            short = server.post("/api/embed", model="short", input="the film", dimensions=16).json
            assert len(short["embeddings"][0]) == 16
            for wrong in (7, 31, 64):
                error = server.refused("/v1/embeddings", input="a", dimensions=wrong)
                assert (error["param"], error["code"]) == ("dimensions", "unsupported")

    def test_dimensions_are_refused_where_a_model_was_not_made_for_them(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="vectors of 384 dimensions, which cannot be") as caught:
            client.embeddings.create(model="minilm", input="x", dimensions=64)
        assert caught.value.param == "dimensions"
        whole = client.embeddings.create(model="minilm", input="x", dimensions=384)
        assert len(whole.data[0].embedding) == 384

    def test_other_models_are_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="this server has 'minilm'") as caught:
            client.embeddings.create(model="text-embedding-3-small", input="x")
        assert caught.value.code == "model_not_found"

    def test_models_are_listed(self, client: openai.OpenAI) -> None:
        listed = {model.id: model for model in client.models.list()}
        assert {"smollm2", "minilm", "small-rerank", "small-classify"} == set(listed)
        card = client.models.retrieve("minilm").to_dict()
        assert (card["max_model_len"], card["state"]) == (256, "ready")
        assert 20_000_000 < card["size"] < 100_000_000  # 22.7 million parameters


BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/embeddings", {}, "input", "required"),
    ("/v1/embeddings", {"input": []}, "input", "empty"),
    ("/v1/embeddings", {"input": [[]]}, "input", "is empty"),
    ("/v1/embeddings", {"input": ["a", 3]}, "input[1]", ""),
    ("/v1/embeddings", {"input": [1, -2]}, "input", "input[1] is -2"),
    ("/v1/embeddings", {"input": [[5], [99999]]}, "input", "input[1][0] is 99999"),
    ("/v1/embeddings", {"input": [7] * 300}, "input", "300 tokens and minilm takes at most 256"),
    ("/v1/embeddings", {"input": ["a"] * 65}, "input", "65 entries; at most 64"),
    ("/v1/embeddings", {"input": ["hello " * 200] * 30}, None, "max_queue_tokens is 4000"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    ("/v1/embeddings", {"input": "a", "frob": 1}, "frob", "unknown"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "it must be -1"),
    ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "input", "has no tokens"),
    ("/rerank", {"query": "a"}, "documents", "required"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "empty"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n is -1"),
    ("/rerank", {"query": "a", "documents": ["film " * 100]}, "documents", "the limit is 64"),
    ("/classify", {"input": ["film " * 100]}, "input", "the limit is 64"),
    ("/pooling", {"input": "a", "task": "score"}, "task", "token_embed"),
    ("/pooling", {"input": ["hello " * 200] * 2}, "input", "would have 155136 numbers; at most 150000"),
    ("/pooling", {"input": "a", "dimensions": 384}, "dimensions", "requires"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
def test_bad_requests_are_told_what_is_wrong(
    served: Live, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    error = served.refused(path, **body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/score", {"text_1": "a", "text_2": ["b", "9"]}, "text_2[1]"), ("/classify", {"input": ["9"]}, "input[0]")],
)
def test_a_tokenizer_with_more_tokens_than_its_model_is_told(served: Live, path: str, body: Any, param: str) -> None:
    words = encoders.tokenizer("bert")
    vocab = encoders.config("bert").vocab_size
    assert words("9")["input_ids"][1] == vocab  # the folder is such a one
    error = served.refused(path, **body)
    assert error["code"] == "invalid_token"
    assert f"a token of {param} is {vocab}; this model's vocabulary has {vocab} tokens" in error["message"]


class TestRankings:
    @pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
    def test_are_the_rerankers(self, served: Live, folders: dict[str, str], path: str) -> None:
        documents = encoders.texts(7, seed=3)
        with hw.pipeline("rerank", folders["rerank"], device="cpu") as peer:
            want = peer(query="the film", documents=documents)
        response = served.post(path, model="small-rerank", query="the film", documents=documents)
        assert response.status == 200
        RerankResponse.model_validate(response.json, strict=True)
        result = response.json["results"]
        assert [one["index"] for one in result] == [one["index"] for one in want]
        assert [one["document"]["text"] for one in result] == [one["text"] for one in want]
        np.testing.assert_allclose(
            [one["relevance_score"] for one in result], [one["score"] for one in want], rtol=1e-4
        )
        assert response.json["usage"]["total_tokens"] > 7

    def test_best_ones_as_objects_and_without_texts(self, served: Live) -> None:
        documents = [{"text": text} for text in encoders.texts(7, seed=3)]
        request_body = {"query": "the film", "documents": documents}
        whole = served.post("/rerank", **request_body).json["results"]
        best = served.post("/rerank", **request_body, top_n=2, return_documents=False).json["results"]
        assert best == [{key: one[key] for key in ("index", "relevance_score")} for one in whole[:2]]
        assert len(served.post("/rerank", **request_body, top_n=0).json["results"]) == 7

    def test_scores_of_pairs(self, served: Live, folders: dict[str, str]) -> None:
        documents = encoders.texts(3, seed=3)
        ranked = served.post("/rerank", query="the film", documents=documents).json["results"]
        want = {one["index"]: one["relevance_score"] for one in ranked}
        response = served.post("/v1/score", model="small-rerank", text_1="the film", text_2=documents)
        ScoreResponse.model_validate(response.json, strict=True)
        scores = [one["score"] for one in response.json["data"]]
        assert scores == pytest.approx([want[i] for i in range(3)], rel=1e-4)
        pairs = served.post("/score", text_1=["the film"] * 3, text_2=documents).json["data"]
        assert [one["score"] for one in pairs] == pytest.approx(scores, rel=1e-4)
        error = served.refused("/score", text_1=["a", "b"], text_2=documents)
        assert error["message"].startswith("text_1 has 2 texts and text_2 has 3")

    def test_an_embedding_model_will_do(self, minilm: hw.Pipeline, tmp_path: Path) -> None:
        documents = ["Quarterly profits rose.", "He plays the guitar.", "It rains."]
        with live(small_engine(tmp_path / "model"), PoolingModels({"embed": "minilm"}, device="cpu")) as served:
            result = served.post("/rerank", query="a musician", documents=documents).json["results"]
            assert served.refused("/classify", input="x")["code"] == "unsupported"
            scores = served.post("/score", text_1="a musician", text_2=documents).json["data"]
            own = served.post("/api/embed", model="minilm:latest", input=["a musician", *documents]).json
        vectors = np.stack(minilm(["a musician", *documents]))
        cosines = vectors[1:] @ vectors[0]
        np.testing.assert_allclose([one["score"] for one in scores], cosines, atol=1e-5)
        np.testing.assert_allclose(own["embeddings"], vectors, atol=2e-6)
        assert [one["index"] for one in result] == np.argsort(-cosines).tolist()
        np.testing.assert_allclose([one["relevance_score"] for one in result], sorted(cosines, reverse=True), atol=1e-5)
        assert result[0]["document"]["text"] == "He plays the guitar."


class TestLabelsAndPooling:
    def test_classify(self, served: Live, folders: dict[str, str]) -> None:
        texts = encoders.texts(9, seed=4)
        with hw.pipeline("text-classification", folders["classify"], device="cpu", top_k=None) as peer:
            want = peer(texts)
        response = served.post("/classify", model="small-classify", input=texts).json
        ClassifyResponse.model_validate(response, strict=True)
        for i, (one, ranked) in enumerate(zip(response["data"], want)):
            assert (one["index"], one["label"], one["num_classes"]) == (i, ranked[0]["label"], 3)
            scores = {part["label"]: part["score"] for part in ranked}
            np.testing.assert_allclose(one["probs"], [scores[name] for name in ("dull", "fair", "great")], rtol=1e-4)

    def test_pooling(self, served: Live, minilm: hw.Pipeline, folders: dict[str, str]) -> None:
        texts = ["hello there", "a longer text than that"]
        with hw.pipeline("feature-extraction", "minilm", device="cpu") as peer:
            states = [np.array(one[0]) for one in peer(texts)]
        response = served.post("/pooling", input=texts).json
        PoolingResponse.model_validate(response, strict=True)
        for one, want in zip(response["data"], states):
            np.testing.assert_allclose(one["data"], want, atol=1e-5)
        coded = served.post("/pooling", input=texts, encoding_format="base64").json["data"]
        for one, want in zip(coded, states):
            got = np.frombuffer(base64.b64decode(one["data"]), dtype="<f4").reshape(want.shape)
            np.testing.assert_allclose(got, want, atol=1e-5)
        vectors = served.post("/pooling", input=texts, task="embed").json["data"]
        np.testing.assert_allclose([one["data"] for one in vectors], np.stack(minilm(texts)), atol=2e-6)
        labels = served.post("/pooling", input="the film", task="classify").json["data"][0]["data"]
        assert labels == served.post("/classify", input="the film").json["data"][0]["probs"]
        by_name = served.post("/pooling", input="the film", model="small-classify").json["data"][0]["data"]
        assert by_name == labels


class TestShared:
    def test_the_decoder_answers_meanwhile(self, served: Live) -> None:
        alone = served.complete("the quick", max_tokens=8, temperature=0)["choices"][0]["text"]
        stop, seen = threading.Event(), []

        def embed() -> None:
            while not stop.is_set():
                seen.append(served.post("/v1/embeddings", input=TEXTS).status)

        worker = threading.Thread(target=embed)
        worker.start()
        try:
            for _ in range(5):
                assert served.complete("the quick", max_tokens=8, temperature=0)["choices"][0]["text"] == alone
        finally:
            stop.set()
            worker.join()
        assert set(seen) == {200}
        served.until(served.is_quiet)

    def test_requests_are_counted(self, served: Live) -> None:
        before = counted(served)
        used = served.post("/v1/embeddings", input="hello there").json["usage"]["prompt_tokens"]
        assert counted(served) == before + used

    def test_without_models_it_says_how_to_have_them(self, tmp_path: Path) -> None:
        with live(small_engine(tmp_path / "model")) as served:
            for path, body, flag in (
                ("/v1/embeddings", {"input": "x"}, "--embed MODEL"),
                ("/rerank", {"query": "x", "documents": ["y"]}, "--rerank MODEL or --embed MODEL"),
                ("/classify", {"input": "x"}, "--classify MODEL"),
                ("/pooling", {"input": "x"}, "--embed MODEL or --classify MODEL"),
            ):
                error = served.refused(path, **body)
                assert error["code"] == "unsupported"
                assert flag in error["message"]

    def test_keys_bind_here_too(self, tmp_path: Path) -> None:
        from headway.server.keys import TenantLimits, add_key

        keys = tmp_path / "keys.json"
        secret = add_key(keys, "ada", TenantLimits(max_tokens=10))
        pooling_models = PoolingModels({"embed": "minilm"}, device="cpu")
        with live(small_engine(tmp_path / "model"), pooling_models, key_file=keys) as served:
            assert served.post("/v1/embeddings", input="x").status == 401
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=secret, max_retries=0)
            assert client.embeddings.create(model="minilm", input="x").data
            with pytest.raises(openai.BadRequestError, match="key's max_tokens is 10"):
                client.embeddings.create(model="minilm", input="word " * 20)


def counted(served: Live) -> int:
    """Tokens of prompts, by the server's own metrics."""
    lines = served.get("/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("headway_prompt_tokens_total"))


class TestBadModels:
    def test_a_model_that_cannot_be_loaded_ends_the_server(self, tmp_path: Path) -> None:
        from headway.server.run import serve
        from headway.server.settings import ServerSettings

        pooling_models = PoolingModels({"embed": str(tmp_path / "nothing")}, device="cpu")
        engine = small_engine(tmp_path / "model")
        with engine, pytest.raises(hw.HeadwayError, match="nothing"):
            serve(ServerSettings(port=0), lambda: engine, pooling_models=pooling_models)

    def test_a_reranker_has_one_score(self, folders: dict[str, str]) -> None:
        with pytest.raises(hw.UnsupportedModel, match="3 outputs; a reranker must have one"):
            PoolingModels({"rerank": folders["classify"]}, device="cpu").open()
        with pytest.raises(hw.InvalidInput, match="'rank' is not a role"):
            PoolingModels({"rank": "minilm"})

    def test_the_answer_is_json_to_its_last_number(self, served: Live) -> None:
        body = served.post("/v1/embeddings", input="hello").body
        assert json.loads(body)["data"][0]["embedding"]
        assert b"NaN" not in body


@pytest.mark.slow
def test_the_routes_are_as_the_server_describes_them(tmp_path: Path) -> None:
    pooling_models = PoolingModels({"embed": "minilm"}, device="cpu")
    with live(small_engine(tmp_path / "model"), pooling_models, max_queue_tokens=20_000) as served:
        fuzzer = Fuzzer(served)
        fuzzer.rounds(60.0)
        for path in ("/v1/embeddings", "/rerank", "/pooling"):
            assert fuzzer.seen[f"POST {path}", 200] > 0
            assert fuzzer.seen[f"POST {path}", 400] > 0
