"""The teacher: its own answers are composed from the page's numbers and the glossary, and the model's come below."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.server.lab.page import STATIC
from headway.server.lab.schema import Base64Array
from support.live import Live

ASK = """async (questions) => {
    const [answers, facts, api] = await Promise.all(["answers", "facts", "api"].map((name) => import(`./${name}.js`)));
    const seen = facts.lessonScreen(await facts.lessonFacts(await api.recording()));
    return questions.map((question) => answers.answer(question, seen).map((one) => one.text).join(" "));
}"""


def percent(p: float) -> str:
    """A probability as the page writes it."""
    return f"{100 * p:.1f}%" if p >= 0.1 else f"{100 * p:.2f}%"


class Truth:
    """The recorded distribution, computed here."""

    def __init__(self) -> None:
        recorded = json.loads(gzip.decompress((STATIC / "recorded.bin").read_bytes()))
        self.vocab, self.model, self.trace = recorded["vocab"], recorded["model"], recorded["trace"]
        self.logits = Base64Array(**self.trace["logits"]).array().astype(np.float64)
        self.order = np.argsort(-self.logits, kind="stable")

    def at(self, temperature: float) -> np.ndarray:
        weights = np.exp((self.logits - self.logits.max()) / temperature)
        return weights / weights.sum()

    def entropy(self, temperature: float) -> float:
        p = self.at(temperature)
        return float(-(p[p > 0] * np.log(p[p > 0])).sum())

    def best(self, temperature: float = 1, rank: int = 0) -> str:
        return percent(self.at(temperature)[self.order[rank]])

    def reach(self, share: float) -> int:
        return int(np.searchsorted(np.cumsum(self.at(1)[self.order]), share)) + 1


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


# A question, and what a right answer to it says.
QUESTIONS: list[tuple[str, Callable[[Truth], list[str]]]] = [
    (
        "Why is the first token so likely?",
        lambda t: [
            "“ girl” has the highest logit of all 49,152",
            f"{t.logits.max():.2f}",
            f"{t.best()} against {t.best(rank=1)}",
            f"= {np.exp(t.logits[t.order[0]] - t.logits[t.order[1]]):.2f}",
        ],
    ),
    (
        "What does temperature do?",
        lambda t: [
            "Below 1 sharpens, above 1 flattens, 0 is greedy",
            *(f"at T = {T} “ girl” has {t.best(T)} and the entropy is {t.entropy(T):.2f} nats" for T in (0.1, 1, 2)),
        ],
    ),
    ("Is a temperature of 1.5 too high?", lambda t: [f"at T = 1.5 “ girl” has {t.best(1.5)}"]),
    ("What happens at temperature 0?", lambda t: ["divide by zero", "here “ girl”, every time", "greedy"]),
    ("And T = 0?", lambda t: ["here “ girl”, every time"]),
    (
        "What does top-p do?",
        lambda t: [f"top-p = 0.9 keeps {t.reach(0.9)} of 49,152 tokens", f"other {49152 - t.reach(0.9):,} are cut"],
    ),
    ("What would top_p 0.5 keep?", lambda t: [f"top-p = 0.5 keeps {t.reach(0.5)} of 49,152 tokens"]),
    (
        "What does top-k = 5 keep?",
        lambda t: ["top-k = 5 keeps 5 of 49,152", f"hold {percent(np.sort(t.at(1))[-5:].sum())}"],
    ),
    (
        "What is the difference between top-k and top-p?",
        lambda t: ["Keeps the k likeliest tokens.", "top-k = 40", "Keeps the fewest likeliest", "top-p = 0.9"],
    ),
    (
        "What is min-p?",
        lambda t: [f"min-p = 0.05 keeps {(t.at(1) >= 0.05 * t.at(1).max()).sum()} of 49,152"],
    ),
    (
        "What is entropy?",
        lambda t: [f"Here it is {t.entropy(1):.2f} nats", f"an even choice among {np.exp(t.entropy(1)):.1f} tokens"],
    ),
    ("How sure is the model?", lambda t: [f"{t.entropy(1):.2f} nats"]),
    ("Which token is the likeliest?", lambda t: [f"“ girl” {t.best()}, “ town” {t.best(rank=1)}"]),
    ("How likely is town?", lambda t: [f"“ town” has a probability of {t.best(rank=1)}", "number 2 of 49,152"]),
    ('What is the probability of "boy"?', lambda t: [f"“ boy” has a probability of {t.best(rank=4)}"]),
    ("What comes out of a forward pass?", lambda t: ["49,152 logits, one for every token", "30 layers", "9 tokens"]),
    ("What is a logit?", lambda t: ["A raw score, before softmax", f"highest is {t.logits.max():.2f} for “ girl”"]),
    ("How does softmax work?", lambda t: ["exponential of each, divided by their sum", f"is {t.best()}"]),
    ("What is greedy decoding?", lambda t: ["Here greedy takes “ girl”", t.best()]),
    ("How is the next token chosen?", lambda t: ["49,152 logits", "top-k, top-p, min-p, typical", "seed 7"]),
    ("What does the seed do?", lambda t: ["The number that fixes a draw", "seed is 7 and the position 8"]),
    ("Why does the first token get so much attention?", lambda t: ["attention sink", "“Once”"]),
    ("How many tokens does the vocabulary have?", lambda t: ["smollm2 has 49,152 tokens"]),
    ("How many tokens does the prompt have?", lambda t: ["The prompt is 9 tokens"]),
    ("Which temperature should I use for evals?", lambda t: ["For evaluations, temperature 0"]),
    ("Why cut the tail?", lambda t: [f"the tail, {49152 - t.reach(0.9):,} tokens"]),
    ("What does a repetition penalty do?", lambda t: ["already occurred", "repetition 1, presence 0"]),
    ("How many layers does the model have?", lambda t: ["30 layers, 9 heads", t.model["format"]]),
    ("What is the KV cache?", lambda t: ["1 page of 16 slots"]),
    ("what's the second most likely token?", lambda t: [f"“ town” {t.best(rank=1)}"]),
    (
        "How much probability do the top 3 have?",
        lambda t: [f"best 3 together have {percent(np.sort(t.at(1))[-3:].sum())}"],
    ),
    ("What does the model predict next?", lambda t: [f"“ girl” {t.best()}"]),
    ("What is the probability of girl at temperature 2?", lambda t: [f"At T = 2 it has {t.best(2)}"]),
    ("Why is town more likely than boy?", lambda t: [f"{t.best(rank=1)} against {t.best(rank=4)}"]),
    ("Why not always pick the best token?", lambda t: [f"{percent(1 - t.at(1).max())} of the probability"]),
    ("How do logits become probabilities?", lambda t: ["the exponential of each", f"is {t.best()}"]),
    ("How many tokens stay with top-p 95%?", lambda t: [f"top-p = 0.95 keeps {t.reach(0.95)} of"]),
    (
        "Why do the probabilities sum to one?",
        lambda t: ["divided by their sum", f"is {t.best()}", "All of them add up to 100%"],
    ),
    (
        "How likely is the second token?",
        lambda t: [f"The second likeliest token is “ town” with {t.best(rank=1)}", f"after “ girl” with {t.best()}"],
    ),
    ("What does a hidden state mean?", lambda t: ["after a layer", "30 layers", "49,152 logits"]),
]


def test_questions_have_right_answers_without_any_model(
    plain_files: str, visit: Callable[..., Any], truth: Truth
) -> None:
    page = visit(plain_files, "/index.html", may_refuse=True).page
    page.locator("#teacher-question").wait_for()
    placeholder = page.locator("#teacher-question").get_attribute("placeholder")
    assert placeholder == QUESTIONS[0][0]
    answers = page.evaluate(ASK, [question for question, _ in QUESTIONS])
    for (question, wanted), text in zip(QUESTIONS, answers, strict=True):
        for part in wanted(truth):
            assert part in text, (question, part, text)


def test_every_word_of_the_glossary_can_be_asked_for(plain_files: str, visit: Callable[..., Any]) -> None:
    page = visit(plain_files, "/index.html#glossary", may_refuse=True).page
    page.locator("dt").first.wait_for()
    terms, meanings = page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts()
    answers = page.evaluate(ASK, [f"What is {term}?" for term in terms])
    for term, meaning, text in zip(terms, meanings, answers, strict=True):
        assert meaning in text, (term, text)


def test_a_question_about_something_else_has_no_composed_answer(plain_files: str, visit: Callable[..., Any]) -> None:
    page = visit(plain_files, "/index.html", may_refuse=True).page
    page.fill("#teacher-question", "Who wrote Hamlet?")
    page.keyboard.press("Enter")
    page.locator(".composed", has_text="The page has no answer to this").wait_for()
    assert page.evaluate(ASK, ["Who wrote Hamlet?"]) == [""]


def test_the_models_words_come_below_and_are_marked(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url).page
    page.wait_for_selector("#teacher-question")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.fill("#teacher-question", "Which token is the likeliest?")
        page.keyboard.press("Enter")
    composed, generated = page.locator(".composed"), page.locator(".generated")
    assert "“ girl” 35.8%" in composed.inner_text()
    assert "From this page's numbers and glossary" in composed.inner_text()
    assert "smollm2's words · generated, may be wrong" in generated.inner_text()
    assert 0 <= composed.bounding_box()["y"] < generated.bounding_box()["y"]
    assert composed.bounding_box()["y"] < page.viewport_size["height"] - 100  # it is in view without scrolling
    system_message = sent.value.post_data_json["messages"][0]["content"]
    assert '" girl" 35.8%' in system_message
    assert "the likeliest tokens are “ girl” 35.8%" in system_message
    generated.locator("p:not(.by)", has_text=re.compile(r"\w{2}")).wait_for()
    # The answer may be over by now, which is as well.
    page.evaluate("[...document.querySelectorAll('button')].find((one) => one.textContent === 'Stop')?.click()")
    page.get_by_role("button", name="Ask", exact=True).wait_for()
    lab_server.until(lab_server.is_quiet)


def test_the_answer_is_about_the_parameters_on_the_screen(plain_files: str, visit: Callable[..., Any]) -> None:
    page = visit(plain_files, "/index.html#lab", may_refuse=True).page
    page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
    page.locator(".strip", has_text=re.compile(r"\d stay")).wait_for()
    for question, wanted in (
        ("What is entropy?", f"After your sampling parameters it is {shown_entropy(page):.2f} nats"),
        ("How likely is table?", "Your sampling parameters cut it."),
        ("What does temperature do?", "It is 0.7 now"),
        ("What does top-p do?", "It is set to 0.9 now."),
        ("How is the next token chosen?", "Set now: temperature 0.7, top_p 0.9. "),
    ):
        page.fill("#teacher-question", question)
        page.keyboard.press("Enter")
        page.locator(".composed", has_text=wanted).wait_for()


def shown_entropy(page: Any) -> float:
    return float(re.search(r"entropy ([\d.]+) nats", page.locator("#entropy").inner_text())[1])
