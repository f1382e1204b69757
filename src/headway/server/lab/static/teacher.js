// Ask the teacher: a chat with the served model, whose prompt describes the distribution on screen.

import { events } from "./api.js";
import { fill, h, percent, whole } from "./dom.js";

/** A chat. `onScreen()` returns {trace, row, params?} or nothing. */
export function teacher(app, onScreen) {
  const conversation = [];
  const log = h("div", { class: "chat-log", tabindex: "0", role: "log", "aria-label": "Conversation with the teacher", hidden: true });
  const field = h("input", { type: "text", id: "teacher-question", maxlength: 2000, autocomplete: "off", placeholder: "Why is the first token so likely?" });
  const send = h("button", { type: "submit", class: "main" }, "Ask");
  const note = h("p", { class: "soft small" }, availability(app.source));
  const possible = app.source.isLive && app.source.model.has_chat;
  field.disabled = send.disabled = !possible;
  let stop = null;

  async function submit(event) {
    event.preventDefault();
    if (stop) return stop.abort();
    const question = field.value.trim();
    if (!question) return field.focus();
    field.value = "";
    conversation.push({ role: "user", content: question });
    const reply = h("p", { class: "theirs" }, "…");
    log.hidden = false;
    log.append(h("p", { class: "mine" }, question), reply);
    stop = new AbortController();
    send.textContent = "Stop";
    let text = "";
    try {
      const messages = [{ role: "system", content: systemPrompt(app.source, onScreen()) }, ...conversation.slice(-6)];
      for await (const one of events("../v1/chat/completions", { messages, max_tokens: 220, temperature: 0.3, top_p: 0.9, stream: true }, stop.signal)) {
        text += one.choices[0]?.delta?.content ?? "";
        reply.textContent = text || "…";
        log.scrollTop = log.scrollHeight;
      }
      conversation.push({ role: "assistant", content: text });
    } catch (error) {
      if (error.name === "AbortError") conversation.push({ role: "assistant", content: text });
      else fill(reply, error.message);
    } finally {
      stop = null;
      send.textContent = "Ask";
    }
  }

  return h("section", { class: "step panel", "aria-labelledby": "teacher-title" }, h("h2", { id: "teacher-title" }, "Ask the teacher"), note, log,
    h("form", { onsubmit: submit, class: "row" }, h("label", { for: "teacher-question", class: "unseen" }, "Your question"),
      h("div", { style: { flex: "1 1 14rem" } }, field), send));
}

function availability(source) {
  if (!source.isLive) return "The teacher is the model itself, and there is no server. `headway lab` starts one.";
  if (!source.model.has_chat) return `${source.model.name} has no chat template, so it cannot chat.`;
  return `A chat with ${source.model.name} itself, through the ordinary route. Its prompt describes what is on your screen. It is a small model: check what it says against the numbers.`;
}

/** The system message. */
export function systemPrompt(source, seen) {
  const lines = [`You are a patient teacher of how language models choose the next token. You are the model ${source.model.name} with ${whole(source.model.vocab_size)} tokens and ${source.model.layers} layers. Answer in at most five short sentences.`];
  if (seen) {
    const top = Array.from(seen.row.order.slice(0, 8), (id) => `${JSON.stringify(source.text(id))} ${percent(seen.row.probs[id])}`);
    lines.push(`On the student's screen is the distribution of the next token after ${JSON.stringify(seen.trace.texts.join("").slice(-400))}: ${top.join(", ")}. Its entropy is ${seen.row.entropy.toFixed(2)} nats.`);
    if (seen.params) lines.push(`The sampling parameters are ${JSON.stringify(seen.params)}.`);
  }
  return lines.join("\n");
}
