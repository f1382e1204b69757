// The server, or the recording that stands in for it.
//
// Addresses are relative to the page, so it works wherever it is mounted. Nothing else is ever asked for anything.

const PATIENCE = 120_000; // milliseconds

/** An answer that is an error: what went wrong, in the server's words or ours. `kind` says who is to blame. */
export class Failure extends Error {
  constructor(message, { status = 0, code = null, kind = "refused" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.kind = kind; // refused · key · busy · gone · offline
  }
}

let key = sessionStorage.getItem("headway-key") ?? "";

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("headway-key", key);
  else sessionStorage.removeItem("headway-key");
}

/** One request; the answer, or a `Failure`. */
export async function ask(path, body = undefined, { signal, stream = false } = {}) {
  const headers = { accept: "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    const limit = AbortSignal.timeout(PATIENCE);
    answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure(error.name === "TimeoutError" ? "The server did not answer in time." : "The server cannot be reached.", { kind: "gone" });
  }
  if (!answer.ok) throw await failure(answer);
  return stream ? answer : answer.json();
}

async function failure(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // not one of ours
  }
  const kind = answer.status === 401 ? "key"
    : answer.status === 429 || answer.status === 409 ? "busy"
    : answer.status >= 500 || answer.status === 404 ? "gone" : "refused";
  const message = error.message ?? `The server answered with status ${answer.status}.`;
  return new Failure(sentence(message), { status: answer.status, code: error.code ?? null, kind });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** The events of a stream, one JSON value each, until [DONE]. */
export async function* events(path, body, signal) {
  const answer = await ask(path, body, { signal, stream: true });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n\n");
    text = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(sentence(event.error.message), { kind: "gone" });
      yield event;
    }
  }
}

const KINDS = { float32: Float32Array, float64: Float64Array, int32: Int32Array };

/** The numbers of a packed array. */
export function unpack({ dtype, data }) {
  const text = atob(data);
  const octets = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) octets[i] = text.charCodeAt(i);
  return new KINDS[dtype](octets.buffer);
}

/** Where distributions come from: a model that is served, with its tokens. */
export class Live {
  static recorded = false;

  constructor(model, vocab) {
    this.model = model;
    this.vocab = vocab;
  }

  get isLive() { return true; }
  text(id) { return this.vocab[id] ?? `<${id}>`; }
  trace(request, signal) { return ask("api/trace", request, { signal }); }
  branches(request, signal) { return ask("api/branches", request, { signal }); }

  /** Greedy tokens behind a prompt, as the ordinary route gives them. */
  async greedy(prompt, count, signal) {
    const answer = await ask("../v1/completions", {
      prompt, max_tokens: count, temperature: 0, repetition_penalty: 1, logprobs: 0,
    }, { signal });
    return { text: answer.choices[0].text, tokens: answer.choices[0].logprobs?.tokens ?? [] };
  }

  /** The ids of one user message, as the model's template writes it. */
  async chatIds(text) {
    return (await ask("../tokenize", { messages: [{ role: "user", content: text }] })).tokens;
  }
}

/** One distribution that a real model once gave, for a page without a server. */
export class Recorded {
  constructor(data) {
    this.data = data;
    this.model = data.model;
    this.vocab = data.vocab;
  }

  get isLive() { return false; }
  text(id) { return this.vocab[id] ?? `<${id}>`; }

  async trace(request) {
    const same = request.prompt === this.data.prompt && !(request.take ?? []).length && !request.mask;
    if (!same) {
      throw new Failure("There is no server behind this page, only one recorded distribution. Start `headway lab` to compute others.", { kind: "offline" });
    }
    return this.data.trace;
  }

  async branches() {
    throw new Failure("Branches need a model. Start `headway lab`.", { kind: "offline" });
  }

  async greedy(prompt, count) {
    const tokens = this.data.greedy.slice(0, count);
    return { text: tokens.join(""), tokens };
  }

  async chatIds() {
    throw new Failure("A chat prompt needs a model. Start `headway lab`.", { kind: "offline" });
  }
}

/** The model that is served: `Live`, or the state of a server that has none now ("loading", …). */
export async function connect() {
  const model = await ask("api/model");
  if (!model.vocab_size) return model.state;
  return new Live(model, await ask("api/vocab"));
}

/** The recording. */
export async function recording() {
  const answer = await fetch("recorded.bin");
  const plain = answer.body.pipeThrough(new DecompressionStream("gzip"));
  return new Recorded(await new Response(plain).json());
}
