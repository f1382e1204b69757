// Ask the teacher. The page answers first, from its own numbers and the glossary; the served model's words come below,
// marked as generated.

import { answer } from "./answers.js";
import { events } from "./api.js";
import { fill, h, percent, whole } from "./dom.js";

/** A conversation. `onScreen()` returns what is on the screen (see answers.js), or nothing. */
export function teacher(app, onScreen) {
  const { source } = app;
  const generates = source.isLive && source.model.has_chat;
  const conversation = [];
  const log = h("div", { class: "chat-log", tabindex: "0", role: "log", "aria-label": "Conversation with the teacher", hidden: true });
  const field = h("input", { type: "text", id: "teacher-question", maxlength: 2000, autocomplete: "off", placeholder: "Why is the first token so likely?" });
  const send = h("button", { type: "submit", class: "main" }, "Ask");
  let stop = null;

  async function submit(event) {
    event.preventDefault();
    if (stop) return stop.abort();
    const question = field.value.trim();
    if (!question) return field.focus();
    field.value = "";
    const seen = onScreen();
    const known = seen ? answer(question, seen) : [];
    log.hidden = false;
    const asked = h("p", { class: "mine" }, question);
    const reply = composed(known, generates);
    log.append(asked, reply);
    reply.scrollIntoView({ block: "nearest", behavior: "instant" });
    log.scrollTop = asked.offsetTop;
    if (generates) await generate(question, seen, known, asked);
  }

  /** The model's own words, as they come. */
  async function generate(question, seen, known, asked) {
    conversation.push({ role: "user", content: question });
    const reply = h("p", {}, "…");
    log.append(h("div", { class: "generated" }, h("p", { class: "by" }, `${source.model.name}'s words · generated, may be wrong`), reply));
    log.scrollTop = asked.offsetTop; // the question and the page's answer stay in view, the model's words come below
    stop = new AbortController();
    send.textContent = "Stop";
    let text = "";
    try {
      const messages = [{ role: "system", content: systemPrompt(source, seen, known) }, ...conversation.slice(-6)];
      for await (const one of events("../v1/chat/completions", { messages, max_tokens: 220, temperature: 0.3, top_p: 0.9, stream: true }, stop.signal)) {
        text += one.choices[0]?.delta?.content ?? "";
        reply.textContent = text || "…";
      }
    } catch (error) {
      if (error.name !== "AbortError") fill(reply, error.message);
    } finally {
      conversation.push({ role: "assistant", content: text });
      stop = null;
      send.textContent = "Ask";
    }
  }

  return h("section", { class: "step panel", "aria-labelledby": "teacher-title" }, h("h2", { id: "teacher-title" }, "Ask the teacher"),
    h("p", { class: "soft small" }, about(source, generates)), log,
    h("form", { onsubmit: submit, class: "row" }, h("label", { for: "teacher-question", class: "unseen" }, "Your question"),
      h("div", { style: { flex: "1 1 14rem" } }, field), send));
}

function about(source, generates) {
  const first = "Answers come from the numbers on this page and the glossary.";
  if (generates) return `${first} Below each, ${source.model.name} says it in its own words: these are generated, and it is a small model.`;
  return source.isLive ? `${first} ${source.model.name} has no chat template, so it adds no words of its own.` : `${first} There is no server, so no model adds words of its own.`;
}

/** What the page knows. */
function composed(known, generates) {
  const lines = known.length ? known.map(({ term, text }) => h("p", {}, term && h("strong", {}, `${term}: `), text))
    : h("p", {}, "The page has no answer to this. It knows the words of the ", h("a", { href: "#glossary" }, "glossary"), ", and every number on the screen.", generates ? " What follows is only the model's." : "");
  return h("div", { class: "composed" }, h("p", { class: "by" }, "From this page's numbers and glossary"), lines);
}

/** The system message. */
function systemPrompt(source, seen, known = []) {
  const lines = [`You are a patient teacher of how language models choose the next token. You are the model ${source.model.name} with ${whole(source.model.vocab_size)} tokens and ${source.model.layers} layers. Answer in at most five short sentences.`];
  if (seen) {
    const top = Array.from(seen.row.order.slice(0, 8), (id) => `${JSON.stringify(source.text(id))} ${percent(seen.row.probs[id])}`);
    lines.push(`On the student's screen is the distribution of the next token after ${JSON.stringify(seen.trace.texts.join("").slice(-400))}: ${top.join(", ")}. Its entropy is ${seen.row.entropy.toFixed(2)} nats.`);
    lines.push(`The sampling parameters are ${JSON.stringify(seen.params)}.`);
  }
  if (known.length) lines.push(`The student has already read this correct answer; do not contradict it, add an example: ${known.map(({ text }) => text).join(" ")}`);
  return lines.join("\n");
}
