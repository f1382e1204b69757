"""Many tasks, threads and event loops at one pipeline; memory that runs out; budgets that are found."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.pipelines.token_budget import CPU_SIZES, ROUNDS, TokenBudget, budget_key, cached_budget
from support import encoders

TEXTS = encoders.texts(64, seed=5)


@pytest.fixture(scope="module")
def embed() -> Iterator[hw.Pipeline]:
    model = encoders.model("bert", "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
        yield p


@pytest.fixture(scope="module")
def want(embed: hw.Pipeline) -> list[np.ndarray]:
    return [embed(text) for text in TEXTS]


def same(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.stack(got), np.stack(wanted), rtol=1e-4, atol=2e-6)


def test_submitted_items_are_batched_together(embed: hw.Pipeline, want: list[np.ndarray]) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*map(embed.submit, TEXTS))

    before = embed.stats()
    same(asyncio.run(main()), want)
    after = embed.stats()
    assert after["rows"] - before["rows"] == 64
    assert after["batches"] - before["batches"] < 32


def test_64_threads_call_stream_and_submit_at_once(embed: hw.Pipeline, want: list[np.ndarray]) -> None:
    def work(i: int) -> Any:
        match i % 4:
            case 0:
                return [embed(text) for text in TEXTS[:8]]
            case 1:
                return list(embed(iter(TEXTS)))
            case 2:
                return embed(TEXTS)

        async def main() -> list[Any]:
            return await asyncio.gather(*map(embed.submit, TEXTS))

        return asyncio.run(main())  # an event loop of its own in each of these threads

    with ThreadPoolExecutor(64) as pool:
        for found in pool.map(work, range(64)):
            same(found, want[: len(found)])


def test_options_of_callers_do_not_mix(embed: hw.Pipeline) -> None:
    async def main() -> list[Any]:
        ways = ("mean", "cls", "last", "max")
        return await asyncio.gather(*(embed.submit(TEXTS[i], pooling=ways[i % 4]) for i in range(32)))

    for i, vector in enumerate(asyncio.run(main())):
        alone = embed(TEXTS[i], pooling=("mean", "cls", "last", "max")[i % 4])
        np.testing.assert_allclose(vector, alone, rtol=1e-4, atol=2e-6)


def test_a_bad_item_fails_alone(embed: hw.Pipeline, want: list[np.ndarray]) -> None:
    async def main() -> list[Any]:
        items = [*TEXTS[:5], None, *TEXTS[5:9], "the " * 500]
        return await asyncio.gather(*map(embed.submit, items), return_exceptions=True)

    got = asyncio.run(main())
    assert isinstance(got[5], hw.WrongType)
    assert isinstance(got[10], hw.InvalidInput)
    same([one for i, one in enumerate(got) if i not in (5, 10)], want[:9])


def test_a_cancelled_item_leaves_the_others(embed: hw.Pipeline, want: list[np.ndarray]) -> None:
    async def main() -> list[Any]:
        tasks = [asyncio.create_task(embed.submit(text)) for text in TEXTS]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(main())
    same(got[1::2], want[1::2])


def test_closing_fails_what_waits() -> None:
    model = encoders.model("bert", "base")
    p = hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cpu")
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(60)

    holder = threading.Thread(target=lambda: p._batcher.call(hold))
    holder.start()
    held.wait(60)

    async def main() -> Any:
        waiting = asyncio.create_task(p.submit("the film"))
        await asyncio.sleep(0.1)
        closing = asyncio.get_running_loop().run_in_executor(None, p.close)
        await asyncio.sleep(0.05)
        go.set()
        await closing
        return await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 60)

    [found] = asyncio.run(main())
    holder.join()
    assert isinstance(found, (hw.Closed, np.ndarray))  # computed just before the end, or told
    with pytest.raises(hw.Closed):
        p("the film")


class Scarce(hw.Task):
    """Embeds through a model on a device that has room for few rows, and breaks on one of them."""

    largest = 3

    def __init__(self, loaded: Any) -> None:
        super().__init__(loaded)
        self.sizes: list[int] = []

    def preprocess(self, item: Any, options: Any) -> hw.PreparedItem:
        return hw.PreparedItem((hw.Row({"input_ids": [2, item, 3]}, 3),), item)

    def forward(self, batch: hw.ModelInputs, options: Any) -> Any:
        self.sizes.append(len(batch.rows))
        if len(batch.rows) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if (batch.inputs["input_ids"] == 13).any():
            raise RuntimeError("thirteen")
        return {"sum": batch.inputs["input_ids"].sum(1)}

    def postprocess(self, prepared: hw.PreparedItem, results: Any, options: Any) -> int:
        return int(results[0]["sum"])

    def is_item(self, value: Any) -> bool:
        return isinstance(value, int)


@pytest.fixture
def scarce() -> Iterator[hw.Pipeline]:
    hw.register_task("scarce", Scarce, replace=True)
    with hw.pipeline("scarce", encoders.model("bert", "base"), tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
        yield p


def test_a_batch_that_does_not_fit_is_halved(scarce: hw.Pipeline) -> None:
    assert scarce(list(range(20, 52))) == [n + 5 for n in range(20, 52)]
    assert scarce.stats()["halvings"] > 0
    sizes = scarce.implementation.sizes  # type: ignore[attr-defined]
    assert max(sizes) > 3
    assert sizes[-1] <= 3
    before = scarce.stats()["halvings"]
    scarce(list(range(20, 52)))
    assert scarce.stats()["halvings"] - before <= before  # smaller batches from then on


def test_a_row_that_never_fits_fails_by_itself(scarce: hw.Pipeline) -> None:
    scarce.implementation.largest = 0  # type: ignore[attr-defined]
    with pytest.raises(hw.PassFailed, match=r"a row of length 3 does not fit into memory by itself"):
        scarce(20)


def test_a_row_that_breaks_the_model_fails_alone(scarce: hw.Pipeline) -> None:
    got = scarce([20, 21, 13, 22], on_error="return")
    assert [got[0], got[1], got[3]] == [25, 26, 27]
    assert isinstance(got[2], hw.PassFailed)
    assert "thirteen" in str(got[2])
    with pytest.raises(hw.PassFailed, match=r"item 1: the model failed on this item: thirteen"):
        scarce([20, 13])


class TestBudget:
    def test_the_size_with_the_highest_rate_is_kept_for_next_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
        rates = dict(zip(CPU_SIZES, (100.0, 900.0, 300.0, 200.0, 50.0)))
        budget = TokenBudget("auto", cpu=True, key="one")
        for _ in range(ROUNDS * len(CPU_SIZES)):
            assert budget.searching
            budget.record(budget.tokens // 4, 1.0)  # half-empty batches say nothing
            budget.record(budget.tokens, budget.tokens / rates[budget.tokens])
        assert not budget.searching
        assert budget.tokens == 512
        kept = json.loads((tmp_path / "pipelines/budgets.json").read_text())
        assert kept["one"]["tokens"] == 512
        again = TokenBudget("auto", cpu=True, key="one")
        assert not again.searching
        assert again.tokens == 512
        assert TokenBudget("auto", cpu=True, key="two").searching
        (tmp_path / "pipelines/budgets.json").write_text("{broken")
        assert cached_budget("one", CPU_SIZES) is None

    def test_too_large_sizes_are_dropped(self) -> None:
        budget = TokenBudget("auto", cpu=True)
        budget.shrink(1024)
        assert budget.tokens == 512
        for _ in range(40):
            budget.record(budget.tokens, 1.0)
        assert budget.tokens <= 512

    def test_keys_differ_with_every_fact(self) -> None:
        assert budget_key(a=1, b=2) == budget_key(b=2, a=1) != budget_key(a=1, b=3)

    @pytest.mark.parametrize("size", [0, -1, True, 1.5, "many", None])
    def test_other_sizes_are_refused(self, size: Any) -> None:
        with pytest.raises(hw.InvalidInput, match="batch_size is"):
            TokenBudget(size, cpu=True)
