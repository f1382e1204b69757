"""An engine of two ranks on CPUs: the same answers as one process and as the oracle, and a clear end when a rank dies.

The engine is opened once for the file. The last test kills its rank.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from test_oracle_machine import CASES, Machine, drive

import headway as hw
from headway.models.capabilities import Capabilities
from headway.models.description import Description, Experts
from headway.testing import random_adapter, random_model
from support import world as w
from support.checks import assert_close, random_tokens
from support.hf import variant
from support.lora import logits_of, save_lora, with_lora

NAME = "llama-biases"  # biases everywhere, and a vocabulary that two do not divide
SOON = 60.0  # seconds on a busy machine; it takes far less than one


@pytest.fixture(autouse=True, scope="module")
def files_go_to_a_folder_of_their_own() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "HEADWAY_CACHE", folder)
        patch.setattr(tempfile, "tempdir", folder)  # what other processes of this machine leave there is not ours
        yield


@pytest.fixture(scope="module")
def pair(files_go_to_a_folder_of_their_own: None) -> Iterator[hw.Engine]:
    """An engine of two ranks."""
    before = set(Path(tempfile.gettempdir()).glob("headway-ranks-*"))
    with hw.Engine(w.model(NAME)[0], threads=2, pages=96, max_batch_tokens=24, tensor_parallel=2) as engine:
        yield engine
    assert not any(is_running(pid) for pid in pids(engine))
    assert set(Path(tempfile.gettempdir()).glob("headway-ranks-*")) <= before


@pytest.fixture(scope="module")
def single() -> Iterator[hw.Engine]:
    """The same model in one process."""
    with hw.Engine(w.model(NAME)[0], threads=1, pages=96, max_batch_tokens=24) as engine:
        yield engine


def pids(engine: hw.Engine) -> list[int]:
    ranks = engine._backend.ranks
    assert ranks is not None
    return ranks.pids


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Any) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


async def everything(engine: hw.Engine) -> list[Any]:
    """All kinds of readouts and samplers, under masks, across pages, with forks and cuts."""
    found: list[Any] = []
    async with engine.context(seed=3) as ctx:
        ctx.fill(random_tokens(engine.vocab_size, 21, seed=1))
        forward = ctx.forward().input(random_tokens(engine.vocab_size, 12, seed=2))
        forward.attention_mask(hw.Mask.sink(2, 9)).mask(forbid=list(range(0, 131, 3)))
        probes = [
            forward.probe(-1, hw.Logits()),
            forward.probe(4, hw.Distribution(0.7, 9)),
            forward.probe(5, hw.Logprobs([3, 130, 65])),
            forward.probe(6, hw.Entropy()),
            *(forward.probe(7, hw.Hidden(layer)) for layer in range(3)),
            *(forward.probe(8, hw.AttentionScores(layer)) for layer in range(2)),
            forward.probe(8, hw.AttentionScores(1, reduce="mean")),
            forward.probe(9, hw.LogitLens((0, 1, 2), 4)),
        ]
        drawn = forward.sample(range(12), hw.Sampling(temperature=0.9, top_p=0.8, seed=11))
        out = await forward.execute()
        reads = (out.logits, out.distribution, out.logprobs, out.entropy, out.hidden, out.attention, out.lens)
        for handle in probes:
            found.append(next(value for read in reads if (value := read(handle)) is not None))  # type: ignore[arg-type]
        found.append(out.tokens(drawn))
        fork = ctx.fork()
        fork.truncate(5)
        forward = fork.forward()
        last = forward.probe(-1, hw.Logits())
        found.append((await forward.execute()).logits(last))
        both = (ctx.generate(hw.Argmax(), max_tokens=20), fork.generate(hw.TopK(5, seed=4), max_tokens=20))
        found += await asyncio.gather(*(generation.tokens() for generation in both))
        fork.release()
    return found


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray) and one.dtype.kind == "f":
        assert_close(one, other)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4)
    else:
        assert np.array_equal(one, other)


def test_readouts_equal_those_of_one_process(pair: hw.Engine, single: hw.Engine) -> None:
    assert_same(pair.run(everything), single.run(everything))


def test_random_programs_equal_the_oracle(pair: hw.Engine) -> None:
    kind = type("OnTwoRanks", (Machine,), {"size": 16, "engine": pair, "judge": w.model(NAME)[1]})
    limits = settings(
        max_examples=4,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        derandomize=True,
    )
    run_state_machine_as_test(kind, settings=limits)


def test_adapters_equal_peft(pair: hw.Engine, tmp_path: Path) -> None:
    _, model = variant(NAME)
    tuned = with_lora(model, seed=5)
    adapter = hw.Adapter.load(save_lora(tmp_path, tuned))
    tokens = random_tokens(131, 20, seed=6)
    plain, under = pair.context(), pair.context()
    forwards = [plain.forward().input(tokens), under.forward().input(tokens).adapter(adapter)]
    handles = [[forward.probe(i, hw.Logits()) for i in range(20)] for forward in forwards]
    outs = [forward.execute() for forward in forwards]  # one step, with and without
    for expected, out, rows in zip((model, tuned), outs, handles, strict=True):
        result = out.result()
        assert_close(np.stack([result.logits(h) for h in rows]), logits_of(expected, tokens))
    assert pair.stats().adapters == 1
    assert pair.stats().adapter_bytes > 0


def test_several_adapters_add_up_as_in_one_process(pair: hw.Engine, single: hw.Engine) -> None:
    adapters = [random_adapter(pair.config, rank=r, seed=r, head=r == 2) for r in (1, 2, 9)]

    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as ctx:
            ctx.fill(random_tokens(engine.vocab_size, 9))
            mix = [(adapters[0], 0.5), (adapters[1], 1.5), (adapters[2], -1.0)]
            return await ctx.generate(hw.Argmax(), max_tokens=6, adapter=mix).tokens()

    assert pair.run(program) == single.run(program)


def test_snapshots_open_on_either_side(pair: hw.Engine, single: hw.Engine) -> None:
    tokens = random_tokens(pair.vocab_size, 40, seed=8)

    async def following(engine: hw.Engine, name: str) -> list[int]:
        context = engine.open(name)
        assert context is not None
        assert context.seq_len == 40
        return await context.generate(hw.Argmax(), max_tokens=6).tokens()

    for one, other in ((pair, single), (single, pair)):
        one.run(_saved, tokens, "both-sides")
        assert one.run(following, "both-sides") == other.run(following, "both-sides")


async def _saved(engine: hw.Engine, tokens: list[int], name: str) -> None:
    async with engine.context() as ctx:
        await ctx.fill(tokens).flush()
        ctx.save(name, durable=True)


def test_slots_move_and_preempted_contexts_come_back(pair: hw.Engine, single: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[Any]:
        found = []
        first, other = engine.context(), engine.context()
        await first.fill(random_tokens(engine.vocab_size, 64, seed=3)).flush()
        first.inner().keep_slots([*range(0, 20), *range(40, 64)], start=0)
        await other.fill(random_tokens(engine.vocab_size, 30, seed=4)).flush()
        other.inner().append_from(first, [0, 1], shift=7)
        held = []
        for i in range(4):  # more than the pool holds: the first ones are preempted, with copies where they must be
            held.append(engine.context())
            await held[-1].fill(random_tokens(engine.vocab_size, 400, seed=10 + i)).flush()
        assert engine.stats().preemptions > 0
        for ctx in (first, other):
            forward = ctx.forward().input([1, 2, 3])
            rows = [forward.probe(i, hw.Logits()) for i in range(3)]
            out = await forward.execute()
            found += [out.logits(h) for h in rows]
        for ctx in (first, other, *held):
            ctx.release()
        return found

    assert_same(pair.run(program), single.run(program))


def test_it_sleeps_and_wakes(pair: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[int]:
        return await ctx.generate(hw.Argmax(), max_tokens=4).tokens()

    ctx = pair.context().fill(random_tokens(pair.vocab_size, 33, seed=9))
    first = pair.run(program)
    pair.sleep()
    assert pair.is_asleep
    pair.wake()
    ctx.truncate(4)
    assert pair.run(program) == first
    ctx.release()


def test_new_weights_reach_every_rank(pair: hw.Engine) -> None:
    old, new = (variant(NAME, seed)[1] for seed in range(2))
    tokens = random_tokens(pair.vocab_size, 19, seed=8)

    async def last(ctx: hw.Context) -> np.ndarray:
        forward = ctx.forward()
        handle = forward.probe(-1, hw.Logits())
        return (await forward.execute()).logits(handle)

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx, engine.context() as kept:
            await kept.fill(tokens[:-1]).flush()
            for model, dtype in ((new, torch.float64), (old, torch.float32)):
                state = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
                await asyncio.to_thread(engine.update_weights, state)
                theirs = model(torch.tensor([tokens])).logits[0, -1].detach().numpy()
                for each, rest in ((ctx, tokens), (kept, tokens[-1:])):
                    assert_close(await last(each.fill(rest)), theirs)
                    each.truncate(len(rest))

    before = pair.fingerprint
    pair.run(program)
    assert pair.capabilities.update_weights
    assert pair.fingerprint != before
    with pytest.raises(hw.InvalidInput, match="this model needs"):  # shapes are the whole model's
        pair.update_weights({"model.norm.weight": torch.zeros(3)})


def test_it_says_what_it_is_and_what_it_does_not_do(pair: hw.Engine) -> None:
    assert (pair.info.tensor_parallel, pair.info.runner) == (2, "torch, 2 ranks")
    assert pair.info.weight_bytes >= pair.config.parameters * 4
    assert pair.capabilities.tensor_parallel == 2
    assert "quantize=" in pair.capabilities.missing()
    assert len(pids(pair)) == 1
    with pytest.raises(hw.Unsupported, match="this engine's process has a share of the model"):
        _ = pair.decoder
    with pytest.raises(hw.Unsupported, match=r"OwnLayers\(1\) shares the weights of one process"):
        pair.run(_speculating)
    with pytest.raises(hw.Unsupported, match="validation computes a model whole, and this process has a share of it"):
        hw.InferenceEngine(pair).enable_validation_diagnostics()


async def _speculating(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        await ctx.fill([1, 2]).generate(hw.Argmax(), max_tokens=3, speculate=hw.OwnLayers(1)).tokens()


@pytest.mark.parametrize(
    ("model", "options", "what"),
    [
        (random_model(heads=3, kv_heads=3), {}, "attention heads, 3, cannot be divided by 2"),
        ("smollm2", {}, "tensor_parallel=2: the llama model's attention heads, 9, cannot be divided by 2"),
        ("smollm2", {"tensor_parallel": 3}, "this model's are quantized; add dtype='float32'"),
        ("smollm2", {"tensor_parallel": 3, "quantize": "int8"}, "leave out quantize='int8'"),
        (random_model(), {"tensor_parallel": 0}, r"tensor_parallel is 0; it must be"),
        (random_model(), {"tensor_parallel": "2"}, "tensor_parallel"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(
    model: Any, options: Any, what: str, smollm2_path: Path
) -> None:
    started, model = subprocess.Popen, smollm2_path if model == "smollm2" else model

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    subprocess.Popen = refuse  # type: ignore[assignment,misc]
    try:
        with pytest.raises(hw.HeadwayError, match=what):
            hw.Engine(model, threads=1, pages=8, **{"tensor_parallel": 2} | options)
    finally:
        subprocess.Popen = started  # type: ignore[misc]


def test_a_rank_that_is_killed_ends_the_engine(pair: hw.Engine) -> None:
    """Whoever waits gets the reason, and so does whoever comes later. It is the last test of this engine."""
    (pid,) = pids(pair)
    contexts = [pair.context().fill(random_tokens(pair.vocab_size, 20, seed=i)) for i in range(4)]

    async def generating(engine: hw.Engine) -> list[BaseException]:
        async def forever(ctx: hw.Context) -> None:
            async for _ in ctx.generate(hw.Argmax(), max_tokens=900, stop=[]):
                pass

        tasks = [asyncio.create_task(forever(ctx)) for ctx in contexts]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        done, pending = await asyncio.wait(tasks, timeout=SOON)
        assert not pending
        return [error for task in done if (error := task.exception()) is not None]

    errors = pair.run(generating)
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, hw.RankLost)
        assert "rank 1 of 2 of the tensor-parallel engine was killed by signal 9 (SIGKILL)" in str(error)
    assert not pair.alive
    with pytest.raises(hw.RankLost, match="SIGKILL"):
        pair.context()


# -- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_interleaving_equals_the_oracle_on_two_ranks(case: Any, deterministic: bool) -> None:
    drive(case, examples=25, steps=25, tensor_parallel=2, deterministic=deterministic)


SCRIPT = """
    import sys, time
    import headway as hw
    from headway.testing import random_model

    engine = hw.Engine(random_model(heads=4, kv_heads=2), threads=1, pages=64, tensor_parallel=2)
    context = engine.context().fill([1, 2, 3])

    async def forever(engine):
        async for _ in context.generate(hw.Argmax(), max_tokens=900, stop=[]):
            if {busy} == 0:
                break

    print(*engine._backend.ranks.pids, flush=True)
    engine.run(forever)
    print("idle", flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 1])
def test_ranks_end_with_a_controller_that_is_killed(busy: int) -> None:
    script = textwrap.dedent(SCRIPT.format(busy=busy, end="time.sleep(600)"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    if not busy:
        assert process.stdout.readline() == "idle\n"
    assert is_running(rank)
    process.kill()
    process.wait()
    until(lambda: not is_running(rank))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["engine.close()", "sys.exit(0)", "raise KeyboardInterrupt", "del engine, context"])
def test_nothing_is_left_however_a_program_ends(end: str) -> None:
    script = textwrap.dedent(SCRIPT.format(busy=0, end=end))
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    rank = int(done.stdout.split()[0])
    until(lambda: not is_running(rank))
    segments = Path("/dev/shm").glob("headway*")
    assert not list(segments)


@pytest.mark.slow
def test_a_rank_killed_while_nobody_computes_ends_the_engine_too() -> None:
    with hw.Engine(random_model(heads=4, kv_heads=2), threads=1, pages=64, tensor_parallel=2) as engine:
        os.kill(pids(engine)[0], signal.SIGKILL)
        until(lambda: not engine.alive)
        with pytest.raises(hw.RankLost, match="SIGKILL"):
            engine.context()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_error_names_the_rank_that_was_killed(rank: int) -> None:
    """Others fail because it is gone, and may say so first."""
    with hw.Engine(random_model(heads=4, kv_heads=4), pages=256, threads=2, tensor_parallel=4) as engine:
        killed = pids(engine)[rank - 1]

        async def program(engine: hw.Engine) -> None:
            async with engine.context() as ctx:
                count = 0
                async for _ in ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=4000, stop_only=True):
                    count += 1
                    if count == 20:
                        os.kill(killed, signal.SIGKILL)

        with pytest.raises(hw.RankLost, match=f"rank {rank} of 4 .* was killed by signal 9"):
            engine.run(program)


@pytest.mark.slow
def test_a_model_in_memory_with_experts_is_sent_to_its_ranks() -> None:
    model = random_model("qwen3", heads=4, kv_heads=4, intermediate_size=48, dtype="bfloat16")
    with hw.Engine(model, threads=1, pages=64, tensor_parallel=4) as engine, hw.Engine(model, pages=64) as single:
        assert len(pids(engine)) == 3
        tokens = random_tokens(model.config.vocab_size, 30)
        rows = []
        for each in (engine, single):
            forward = each.context().forward().input(tokens)
            handle = forward.probe(-1, hw.Logits())
            rows.append(forward.execute().result().logits(handle))
        assert_close(rows[0], rows[1], tolerance=3e-2)


@pytest.mark.slow
def test_ranks_have_the_adapters_of_their_own_experts() -> None:
    what = Description(experts=Experts(count=6, per_token=2, size=20, shared_size=24))
    model = random_model(description=what, heads=2, kv_heads=2, layers=2)
    adapter, rows = random_adapter(model.config, rank=3, seed=4, roles=capable(model)), []
    with hw.Engine(model, threads=1, pages=32, tensor_parallel=2) as engine, hw.Engine(model, pages=32) as single:
        for each in (engine, single):
            context, tokens = each.context(), random_tokens(each.vocab_size, 12)
            forward = context.forward().input(tokens).adapter(adapter, 0.7)
            handles = [forward.probe(i, hw.Logits()) for i in range(12)]
            out = forward.execute().result()
            rows.append(np.stack([out.logits(handle) for handle in handles]))
            plain = each.context().forward().input(tokens)
            without = plain.probe(-1, hw.Logits())
            assert np.abs(plain.execute().result().logits(without) - rows[-1][-1]).max() > 0.1
    assert_close(rows[0], rows[1])


def capable(model: Any) -> tuple[str, ...]:
    """The linear layers of a model that adapters may change."""
    return Capabilities.of(model.config).adapters


@pytest.mark.slow
def test_ranks_draw_the_same_bits_alone_and_in_company() -> None:
    """With deterministic=True: also in other chunks of the prompt, and beside other rows."""

    async def alone(engine: hw.Engine) -> list[Any]:
        return await everything(engine)

    async def in_company(engine: hw.Engine) -> list[Any]:
        async with engine.context() as mate:
            mate.fill(random_tokens(engine.vocab_size, 30, seed=8))
            found, *_ = await asyncio.gather(everything(engine), mate.generate(hw.Argmax(), max_tokens=40).tokens())
        return found

    def bits(value: Any) -> Any:
        return [bits(v) for v in value] if isinstance(value, list | tuple) else np.asarray(value).tobytes()

    how: dict[str, Any] = {"threads": 2, "pages": 96, "tensor_parallel": 2, "deterministic": True}
    with hw.Engine(w.model(NAME)[0], max_batch_tokens=24, **how) as engine:
        want = bits(engine.run(alone))
        assert bits(engine.run(in_company)) == want
    with hw.Engine(w.model(NAME)[0], max_batch_tokens=7, **how) as engine:
        assert bits(engine.run(in_company)) == want


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_of_cuda_devices_compute_shares_too(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes the place of a device, and gloo that of NCCL."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("Triton's interpreter is for machines without a device")
    model = random_model("qwen2", heads=4, kv_heads=2, layers=2, vocab_size=131)
    adapter = random_adapter(model.config, rank=3, seed=4)

    async def program(engine: hw.Engine) -> list[Any]:
        ctx, other = engine.context(), engine.context()
        forward = ctx.forward().input([1, 2, 3, 4, 5, 6, 7])
        found = [forward.probe(2, hw.AttentionScores(1)), forward.probe(3, hw.LogitLens((0, 1), 5))]
        last = forward.probe(-1, hw.Logits())
        out = await forward.execute()
        values: list[Any] = [out.logits(last), out.attention(found[0]), out.lens(found[1])]  # type: ignore[arg-type]
        values.append(await ctx.generate(hw.Argmax(), max_tokens=3).tokens())
        forward = ctx.forward()  # the last token's state, which rank 0 alone has kept
        last = forward.probe(-1, hw.Logits())
        values.append((await forward.execute()).logits(last))
        forward = other.forward().input([5, 6, 7]).adapter(adapter, 0.7)
        last = forward.probe(-1, hw.Logits())
        return [*values, (await forward.execute()).logits(last)]

    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    with hw.Engine(model, threads=2, pages=64, tensor_parallel=2, deterministic=deterministic) as engine:
        assert engine.info.runner == "triton, 2 ranks"
        split = engine.run(program)
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(model, threads=1, pages=64) as engine:
        assert_same(split, engine.run(program))
