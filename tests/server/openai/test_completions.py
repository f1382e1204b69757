"""/v1/completions against the same calls in process: tokens, log-probabilities, counts, and every option's effect."""

from __future__ import annotations

import json
import math
import re

import pytest

import headway as hw

PROMPT = "Kubernetes pods are scheduled by the"


def in_process(engine, prompt, sampler, **options):
    """Text and tokens of the same call in this process."""

    async def program(engine):
        async with engine.context() as ctx:
            generation = ctx.fill(prompt).generate(sampler, **options)
            return await generation.text(), await generation.tokens()

    return engine.run(program)


def text(response, index=0):
    return response["choices"][index]["text"]


# -- the law: the same tokens as in process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ({"temperature": 0}, hw.Argmax()),
        ({"seed": 7}, hw.Multinomial(1.0, seed=7)),
        ({"temperature": 0.8, "top_p": 0.9, "seed": 11}, hw.TopP(0.9, temperature=0.8, seed=11)),
        ({"temperature": 1.3, "top_k": 5, "min_p": 0.02, "seed": 3}, hw.Sampling(1.3, top_k=5, min_p=0.02, seed=3)),
        ({"top_k": -1, "typical_p": 0.7, "seed": 2}, hw.Typical(0.7, seed=2)),
        ({"temperature": 0, "logit_bias": {"253": 5, "28": -100.0}}, hw.Sampling(0.0, logit_bias={253: 5, 28: -100})),
    ],
)
def test_a_request_gives_the_tokens_of_the_same_call_in_process(served, options, sampler):
    expected, tokens = in_process(served.engine, PROMPT, sampler, max_tokens=12)
    response = served.complete(PROMPT, max_tokens=12, **options)
    assert text(response) == expected
    assert response["usage"]["completion_tokens"] == len(tokens)
    assert response["usage"]["prompt_tokens"] == len(served.engine.tokenizer.encode(PROMPT))


@pytest.mark.parametrize(
    "rule",
    [{"dry_multiplier": 0.8, "dry_allowed_length": 1}, {"xtc_probability": 0.7}, {"mirostat": 2, "mirostat_tau": 3.0}],
)
def test_dry_xtc_and_mirostat_are_those_of_the_same_call_in_process(served, rule):
    expected, _ = in_process(served.engine, PROMPT, hw.Multinomial(seed=7), max_tokens=12, **rule)
    assert text(served.complete(PROMPT, max_tokens=12, seed=7, **rule)) == expected
    options = {"num_predict": 12, "seed": 7, "temperature": 1.0, **rule}
    asked = {"model": "smollm2", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    assert served.post("/api/generate", **asked).json["response"] == expected


def test_the_repetition_penalty_has_the_name_of_llama_server_too(served):
    expected = served.complete(PROMPT, max_tokens=12, temperature=0, repetition_penalty=1.5)
    assert text(served.complete(PROMPT, max_tokens=12, temperature=0, repeat_penalty=1.5)) == text(expected)


def test_several_choices_are_the_draws_of_one_seed(served):
    async def program(engine):
        async with engine.context() as ctx:
            generations = ctx.fill(PROMPT).generate(hw.Multinomial(seed=5), num_return_sequences=3, max_tokens=8)
            return await generations.texts()

    expected = served.engine.run(program)
    response = served.complete(PROMPT, max_tokens=8, seed=5, n=3)
    assert [choice["text"] for choice in response["choices"]] == expected
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    assert len(set(expected)) > 1
    greedy = served.complete(PROMPT, max_tokens=4, temperature=0, n=2)
    assert text(greedy, 0) == text(greedy, 1)


def test_penalties_count_what_was_generated(served):
    """As `SamplingParams` says: the prompt is not penalized."""
    params = hw.SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    expected, _ = in_process(served.engine, PROMPT, params.sampling(), max_tokens=16, penalize_prompt=False)
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0}
    response = served.complete(PROMPT, max_tokens=16, **options)
    assert text(response) == expected
    assert expected != text(served.complete(PROMPT, max_tokens=16, temperature=0))


def test_without_a_temperature_tokens_are_drawn(served):
    """OpenAI's default is 1; two requests without a seed draw differently."""
    texts = {text(served.complete("A list of words:", max_tokens=12)) for _ in range(3)}
    assert len(texts) > 1


# -- prompts -------------------------------------------------------------------------------------------------------


def test_every_form_of_prompt_means_the_same(served):
    ids = served.engine.tokenizer.encode(PROMPT)
    expected = text(served.complete(PROMPT, max_tokens=6, temperature=0))
    for prompt in (ids, [PROMPT], [ids]):
        assert text(served.complete(prompt, max_tokens=6, temperature=0)) == expected


def test_lists_of_prompts_are_answered_in_order(served):
    prompts = ["The sky is", PROMPT, "One, two, three,"]
    alone = [text(served.complete(prompt, max_tokens=5, temperature=0)) for prompt in prompts]
    together = served.complete(prompts, max_tokens=5, temperature=0)
    assert [choice["text"] for choice in together["choices"]] == alone
    twice = served.complete(prompts, max_tokens=5, seed=4, n=2)
    assert [choice["index"] for choice in twice["choices"]] == list(range(6))
    separate = [served.complete(prompt, max_tokens=5, seed=4, n=2)["choices"] for prompt in prompts]
    assert [c["text"] for c in twice["choices"]] == [c["text"] for pair in separate for c in pair]


def test_names_of_special_tokens_in_a_prompt_are_plain_text(served):
    ids = served.engine.tokenizer.encode("<|im_end|>")
    assert len(ids) > 1
    assert served.complete("<|im_end|>", max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


# -- log-probabilities ---------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model(served):
    engine = served.engine

    async def program(engine):
        async with engine.context() as ctx:
            ctx.fill(PROMPT)
            return [
                step async for step in ctx.generate(hw.Multinomial(seed=9), max_tokens=6, probe=hw.Distribution(k=0))
            ]

    steps = engine.run(program)
    result = served.complete(PROMPT, max_tokens=6, seed=9, logprobs=3)["choices"][0]
    logprobs = result["logprobs"]
    assert logprobs["tokens"] == [engine.tokenizer.decode(step.tokens) for step in steps]
    assert "".join(logprobs["tokens"]) == result["text"]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(6)]
    for step, logprob, top in zip(steps, logprobs["token_logprobs"], logprobs["top_logprobs"]):
        ids, probs = step.probes[0]
        chances = dict(zip(ids.tolist(), probs.tolist()))
        assert logprob == pytest.approx(math.log(chances[step.tokens[0]]), abs=1e-5)
        expected = {engine.tokenizer.decode([id]): math.log(chances[id]) for id in ids[:3].tolist()}
        expected[engine.tokenizer.decode(step.tokens)] = logprob
        assert top == pytest.approx(expected, abs=1e-5)


def test_processed_logprobs_are_those_of_the_draw(served):
    response = served.complete(
        PROMPT, max_tokens=4, seed=1, logprobs=10, top_k=3, temperature=0.5, logprobs_mode="processed"
    )
    for top in response["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) == 3
        assert sum(map(math.exp, top.values())) == pytest.approx(1.0, abs=1e-6)
    raw = served.complete(PROMPT, max_tokens=4, seed=1, logprobs=10, top_k=3, temperature=0.5, logprobs_mode="raw")
    assert text(raw) == text(response)
    assert len(raw["choices"][0]["logprobs"]["top_logprobs"][0]) == 10


def test_a_forced_token_has_its_own_logprob_too(served):
    """A grammar that forces tokens feeds them without a pass each; not when each is to be ranked."""
    shape = {"regex": "The answer is (yes|no)\\."}
    plain = served.complete(PROMPT, max_tokens=20, temperature=0, structured_outputs=shape)["choices"][0]
    ranked = served.complete(PROMPT, max_tokens=20, temperature=0, structured_outputs=shape, logprobs=0)["choices"][0]
    assert plain["text"] == ranked["text"]
    assert "".join(ranked["logprobs"]["tokens"]) == ranked["text"]
    assert None not in ranked["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_scores_the_prompt(served, max_tokens):
    engine, ids = served.engine, served.engine.tokenizer.encode(PROMPT)

    async def program(engine):
        async with engine.context() as ctx:
            forward = ctx.forward().input(ids)
            handles = [forward.probe(i, hw.Logprob(ids[i + 1])) for i in range(len(ids) - 1)]
            out = await forward.execute()
            return [float(out.logprobs(handle)[0]) for handle in handles]

    response = served.complete(PROMPT, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    choice, logprobs = response["choices"][0], response["choices"][0]["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(engine.run(program), abs=1e-4)
    assert response["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    if max_tokens:
        plain = served.complete(PROMPT, max_tokens=max_tokens, temperature=0)
        assert choice["text"] == PROMPT + text(plain)


def test_echo_of_token_ids_is_their_text(served):
    ids = served.engine.tokenizer.encode(PROMPT)
    assert text(served.complete(ids, max_tokens=0, echo=True)) == PROMPT
    result = [served.complete(one, max_tokens=0, echo=True, logprobs=0)["choices"][0] for one in (PROMPT, ids)]
    assert result[0] == result[1]


def test_prompt_logprobs_have_ranks(served):
    ids = served.engine.tokenizer.encode(PROMPT)
    choice = served.complete(PROMPT, max_tokens=1, prompt_logprobs=2, temperature=0)["choices"][0]
    result = choice["prompt_logprobs"]
    assert result[0] is None
    assert choice["logprobs"] is None
    for id, entry in zip(ids[1:], result[1:]):
        assert str(id) in entry
        assert 2 <= len(entry) <= 3
        assert {one["rank"] for one in entry.values()} >= {1, 2}
    echoed = served.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert [entry[str(id)]["logprob"] for id, entry in zip(ids[1:], result[1:])] == echoed["token_logprobs"][1:]


def test_long_prompts_are_scored_whole(served):
    """More rows than one pass reads."""
    ids = served.engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 20)
    assert len(ids) > 130
    result = served.complete(ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert len(result["token_logprobs"]) == len(ids)
    again = served.complete(ids, max_tokens=0, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert [entry[str(id)]["logprob"] for id, entry in zip(ids[1:], again[1:])] == result["token_logprobs"][1:]


def test_best_of_returns_the_likeliest(served):
    all_three = served.complete(PROMPT, max_tokens=6, seed=21, n=3, logprobs=0)["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / 6 for one in all_three]
    best = served.complete(PROMPT, max_tokens=6, seed=21, n=1, best_of=3)
    assert text(best) == all_three[means.index(max(means))]["text"]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 18
    two = served.complete(PROMPT, max_tokens=6, seed=21, n=2, best_of=3, logprobs=0)["choices"]
    assert [sum(one["logprobs"]["token_logprobs"]) / 6 for one in two] == sorted(means, reverse=True)[:2]


# -- where it stops ------------------------------------------------------------------------------------------------


def test_stop_strings_leave_text_and_tokens(served):
    plain = text(served.complete(PROMPT, max_tokens=24, temperature=0))
    stop = plain[20:26]
    response = served.complete(PROMPT, max_tokens=24, temperature=0, stop=["never", stop], logprobs=0)
    choice = response["choices"][0]
    assert choice["text"] == plain[: plain.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["text"].startswith("".join(choice["logprobs"]["tokens"]))
    assert response["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    expected, tokens = in_process(served.engine, PROMPT, hw.Argmax(), max_tokens=24, stop=[stop])
    assert (choice["text"], response["usage"]["completion_tokens"]) == (expected, len(tokens))


def test_stop_token_ids_and_minimum(served):
    engine = served.engine
    _, tokens = in_process(engine, PROMPT, hw.Argmax(), max_tokens=10)
    at = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i >= 3)
    response = served.complete(PROMPT, max_tokens=10, temperature=0, stop_token_ids=[tokens[at]])
    assert text(response) == engine.tokenizer.decode(tokens[:at])
    assert response["choices"][0]["finish_reason"] == "stop"
    longer = served.complete(PROMPT, max_tokens=10, temperature=0, stop_token_ids=[tokens[at]], min_tokens=9)
    expected, _ = in_process(engine, PROMPT, hw.Argmax(), max_tokens=10, stop=[tokens[at]], min_tokens=9)
    assert text(longer) == expected
    assert longer["usage"]["completion_tokens"] >= 9


def test_ignore_eos_goes_on(served):
    end = served.engine.tokenizer.eos_ids[0]
    forced = {str(end): 1000}
    assert served.complete(PROMPT, max_tokens=4, logit_bias=forced)["choices"][0]["finish_reason"] == "stop"
    response = served.complete(PROMPT, max_tokens=4, logit_bias=forced, ignore_eos=True, logprobs=0)
    assert response["choices"][0]["finish_reason"] == "length"
    assert response["choices"][0]["logprobs"]["tokens"] == ["<|im_end|>"] * 4
    assert response["usage"]["completion_tokens"] == 4


# -- what may come -------------------------------------------------------------------------------------------------


def test_only_allowed_tokens_come(served):
    allowed = [253, 260, 28, 30]
    response = served.complete(PROMPT, max_tokens=12, seed=3, allowed_token_ids=allowed, logprobs=0)
    words = {served.engine.tokenizer.decode([id]) for id in allowed}
    assert set(response["choices"][0]["logprobs"]["tokens"]) <= words


def test_bad_words_do_not_come(served):
    plain = text(served.complete(PROMPT, max_tokens=20, temperature=0))
    word = re.findall(r"[A-Za-z]{4,}", plain)[0]
    for bad in (word, served.engine.tokenizer.encode(" " + word)):
        other = text(served.complete(PROMPT, max_tokens=20, temperature=0, bad_words=[bad]))
        assert plain != other
        assert f" {word}" not in other
    _, tokens = in_process(served.engine, PROMPT, hw.Argmax(), max_tokens=20)
    pair = tokens[4:6]
    result = served.complete(PROMPT, max_tokens=20, temperature=0, bad_words=[pair], logprobs=0)["choices"][0]
    assert result["logprobs"]["tokens"][:5] == [served.engine.tokenizer.decode([id]) for id in tokens[:5]]
    assert result["logprobs"]["tokens"][5] != served.engine.tokenizer.decode([tokens[5]])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, re.compile(r"[0-9]{3}-[0-9]{4}").fullmatch),
        ({"choice": ["red", "green", "blue"]}, {"red", "green", "blue"}.__contains__),
        ({"grammar": 'start: "(" /[a-z]{2,5}/ ")"'}, re.compile(r"\([a-z]{2,5}\)").fullmatch),
        ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}}, None),
        ({"json": '{"enum": ["a", 5]}'}, lambda text: json.loads(text) in ("a", 5)),
    ],
)
def test_structured_outputs_have_their_form(served, shape, fits):
    for seed in (1, 2):
        choice = served.complete("Example:", max_tokens=80, seed=seed, structured_outputs=shape)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert fits(choice["text"]) if fits else len(json.loads(choice["text"])) == 2


def test_bad_words_and_a_form_hold_together(served):
    """Neither as one token nor as letters: no run of whole tokens is the word."""
    shape = {"regex": "(red|tan|[a-z]{3})"}
    words = ["red", "tan", "and", "the", "you"]
    for seed in range(4):
        result = served.complete("Color:", seed=seed, structured_outputs=shape, bad_words=words)
        assert re.fullmatch("[a-z]{3}", text(result))
        assert text(result) not in words


# -- counts and streams --------------------------------------------------------------------------------------------


def test_cached_tokens_are_counted(served):
    prompt = "Once there was a cache that counted every page it ever found again, and it was " * 3
    ids = served.engine.tokenizer.encode(prompt)
    assert served.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    usage = served.complete(prompt, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": (len(ids) - 1) // 16 * 16}
    assert usage["total_tokens"] == len(ids) + 1


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"n": 2, "logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_a_stream_adds_up_to_the_whole(served, extra):
    request_body = {"prompt": [PROMPT, "The sky is"], "max_tokens": 6, "seed": 8, "stop": ["\n\n"], **extra}
    whole = served.complete(**request_body)
    events = served.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **request_body).events
    *chunks, last = events
    assert last["choices"] == []
    # of prompts that have been scored before less may be in the cache
    assert {**last["usage"], "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["object"] for chunk in events} == {"text_completion"}
    assert len({chunk["id"] for chunk in events}) == 1
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [v for one in mine if one["logprobs"] for v in one["logprobs"][name]] == values
    plain = served.post("/v1/completions", prompt="x", max_tokens=1, stream=True).events
    assert all("usage" not in chunk for chunk in plain)


def test_no_character_is_ever_cut(served):
    """Tokens that are parts of a character come as bytes; the text has whole characters only."""
    ids = served.engine.tokenizer.encode("🦜")
    assert len(ids) > 1
    shape = {"choice": ["🦜🦜"]}
    events = served.post(
        "/v1/completions", prompt="Bird:", max_tokens=20, stream=True, structured_outputs=shape, logprobs=0
    ).events
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == "🦜🦜"
    assert all("\ufffd" not in piece for piece in pieces)
    tokens = [t for event in events if (logprobs := event["choices"][0]["logprobs"]) for t in logprobs["tokens"]]
    assert any(token.startswith("bytes:\\x") for token in tokens)
