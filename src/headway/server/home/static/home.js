// The chat at the server's own page. What the model writes is only ever inserted as text; no request goes elsewhere.

const TOP = 5; // likeliest tokens shown for each
const at = (id) => document.getElementById(id);
const messages = []; // of the chat, as the API has them
let key = sessionStorage.getItem("headway-key") ?? "";
let running = null; // the AbortController of the answer under way
let chats = 0; // how many were begun: an answer that was under way belongs to none
let cards = []; // the models that a chat may be with, as /v1/models has them
const POLL_MS = 1000; // between looks at a model that loads
const OPEN = ["lab", "health"]; // links that need no key: the Lab asks for it itself

/** An element with text: el("span", "text", {class: "x"}). */
function el(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

async function ask(path, body, signal) {
  const headers = { accept: "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, credentials: "omit" });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `status ${response.status}`);
  return response;
}

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

async function begin() {
  try {
    const { links } = await (await ask("./")).json();
    const names = { lab: "Lab", docs: "Docs", metrics: "Metrics", models: "Models", health: "Health", api: "openapi.json" };
    const show = (kept) => at("links").replaceChildren(...Object.keys(names).filter((name) => links[name] && kept(name)).map((name) => el("a", names[name], { href: links[name], ...(OPEN.includes(name) ? {} : { "data-key": "" }) })));
    show((name) => OPEN.includes(name)); // the others once it is known that they answer
    await readModels();
    show(() => true);
  } catch (error) {
    at("state").textContent = error.message;
  }
}

// -- the models --------------------------------------------------------------------------------------------------------

async function readModels() {
  cards = (await (await ask("v1/models")).json()).data.filter((card) => card.role === "generate");
  const before = at("models").value;
  at("models").replaceChildren(...cards.map((card) => el("option", card.id, { value: card.id })));
  if (cards.some((card) => card.id === before)) at("models").value = before;
  at("choice").hidden = cards.length < 2;
  showModel();
}

/** What the chosen model is, and whether it is loaded: one that is not loads with the first message. */
function showModel() {
  const card = cards.find((one) => one.id === at("models").value);
  at("model").textContent = card?.id ?? "Headway";
  document.title = card ? `${card.id} · Headway` : "Headway";
  const state = { absent: "loads with the first message", draining: "unloading" }[card?.state] ?? card?.state ?? "there is no model";
  const done = card?.progress == null ? "" : ` ${Math.round(100 * card.progress)} %`;
  const length = card?.max_model_len ? ` · context of ${card.max_model_len.toLocaleString("en")} tokens` : "";
  at("state").textContent = `${state}${done}${length}`;
}

at("models").addEventListener("change", showModel);

/** Open a link that needs the key, which a browser does not send by itself. */
at("links").addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-key]");
  if (!link || !key) return;
  event.preventDefault();
  const tab = window.open("", "_blank"); // at once: later it would be a pop-up
  try {
    const page = URL.createObjectURL(await (await ask(link.href)).blob());
    (tab ?? window).location.assign(page);
  } catch (error) {
    tab?.close();
    at("state").textContent = error.message;
  }
});

// -- one answer --------------------------------------------------------------------------------------------------------

function bubble(role) {
  const item = el("li");
  item.append(el("span", role === "user" ? "You" : "Model", { class: "who" }));
  at("messages").append(item);
  return item;
}

async function send() {
  const text = at("text").value;
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  bubble("user").append(text);
  at("text").value = "";
  const item = bubble("assistant");
  item.setAttribute("aria-busy", "true");
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  const chat = chats;
  const ready = cards.find((card) => card.id === at("models").value)?.state === "ready";
  const look = ready ? 0 : setInterval(() => readModels().catch(() => {}), POLL_MS);
  let answer = "";
  try {
    answer = await stream(item);
  } catch (error) {
    answer = item.dataset.text ?? "";
    item.append(el("p", error.name === "AbortError" ? "stopped" : error.message, { class: "error", role: "alert" }));
  }
  if (chat === chats) {
    if (answer) messages.push({ role: "assistant", content: answer });
    else messages.pop(); // a question without an answer is not part of the chat
  }
  clearInterval(look);
  if (!ready) readModels().catch(() => {});
  running = null;
  item.removeAttribute("aria-busy");
  at("stop").disabled = true;
  at("send").disabled = false;
}

async function stream(item) {
  const body = { messages, stream: true, logprobs: true, top_logprobs: TOP };
  if (cards.length > 1) body.model = at("models").value;
  body.temperature = Number(at("temperature").value);
  body.max_tokens = Number(at("tokens").value);
  const response = await ask("v1/chat/completions", body, running.signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return item.dataset.text ?? "";
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) add(item, choice);
    }
  }
}

/** Add a chunk: a span for each token where the tokens are the text, otherwise one for all of them. */
function add(item, { delta, logprobs }) {
  if (delta.reasoning_content) item.append(el("span", delta.reasoning_content, { class: "thought" }));
  if (!delta.content) return;
  item.dataset.text = (item.dataset.text ?? "") + delta.content;
  const tokens = logprobs?.content ?? [];
  const same = tokens.length && tokens.map((token) => token.token).join("") === delta.content;
  const spans = same ? tokens.map((token) => [token.token, [token]]) : [[delta.content, tokens]];
  for (const [text, ranked] of spans) {
    const span = el("span", text, { class: "token", tabindex: item.querySelector(".token") ? "-1" : "0" });
    span.ranked = ranked;
    item.append(span);
  }
}

// -- how likely a token was --------------------------------------------------------------------------------------------

const shown = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "·") || "(nothing)";
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function show(span) {
  const table = el("table");
  for (const token of span.ranked) {
    const others = token.top_logprobs.filter((other) => other.token !== token.token);
    for (const one of [token, ...others].sort((a, b) => b.logprob - a.logprob)) {
      const row = el("tr", "", one === token ? { class: "chosen" } : {});
      const bar = el("td");
      bar.append(el("progress", "", { max: "1", value: String(Math.exp(one.logprob)), "aria-hidden": "true" }));
      row.append(el("th", shown(one.token) + (one === token ? " (chosen)" : ""), { scope: "row" }), el("td", percent(one.logprob)), bar);
      table.append(row);
    }
  }
  at("likely").replaceChildren(span.ranked.length ? table : el("p", "The server sent no probabilities for this text."));
  at("likely").hidden = false;
}

for (const kind of ["pointerover", "focusin", "click"])
  at("messages").addEventListener(kind, ({ target }) => target.ranked && show(target));

at("messages").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.ranked) return;
  const tokens = [...event.target.closest("li").querySelectorAll(".token")];
  const next = tokens[tokens.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// -- controls ----------------------------------------------------------------------------------------------------------

at("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  chats += 1;
  messages.length = 0;
  at("messages").replaceChildren();
  at("likely").hidden = true;
  at("text").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("headway-key", key);
  at("key-form").hidden = true;
  begin();
});

begin();
