// The server, or the recording that replaces it.
//
// URLs are relative to the page, so it works wherever it is mounted. No request goes anywhere else.

const TIMEOUT = 120_000; // milliseconds

/** A failed request, with the server's message or ours. `kind` says what failed. */
export class Failure extends Error {
  constructor(message, { status = 0, code = null, kind = "rejected" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.kind = kind; // rejected · key · busy · gone · offline
  }
}

let key = sessionStorage.getItem("headway-key") ?? "";

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("headway-key", key);
  else sessionStorage.removeItem("headway-key");
}

export function apiKey() {
  return key;
}

/** Send one request; returns the response, or throws a `Failure`. */
export async function ask(path, body = undefined, { signal, stream = false } = {}) {
  const headers = { accept: "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const limit = AbortSignal.timeout(TIMEOUT);
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure(error.name === "TimeoutError" ? "The server did not respond in time." : "The server cannot be reached.", { kind: "gone" });
  }
  if (!response.ok) throw await failure(response);
  return stream ? response : response.json();
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not a JSON error of the server
  }
  const kind = response.status === 401 ? "key"
    : response.status === 429 || response.status === 409 ? "busy"
    : response.status >= 500 || response.status === 404 ? "gone" : "rejected";
  const message = error.message ?? `The server responded with status ${response.status}.`;
  return new Failure(sentence(message), { status: response.status, code: error.code ?? null, kind });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** The events of a stream, one JSON value each, until [DONE]. */
export async function* events(path, body, signal) {
  const response = await ask(path, body, { signal, stream: true });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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

/** The numbers of a base64 array. */
export function unpack({ dtype, data }) {
  const text = atob(data);
  const octets = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) octets[i] = text.charCodeAt(i);
  return new KINDS[dtype](octets.buffer);
}

/** A live source of distributions: the served model, with its vocabulary. */
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

  /** Greedy tokens after a prompt, from the ordinary route. */
  async greedy(prompt, count, signal) {
    const response = await ask("../v1/completions", {
      prompt, max_tokens: count, temperature: 0, repetition_penalty: 1, logprobs: 0,
    }, { signal });
    return { text: response.choices[0].text, tokens: response.choices[0].logprobs?.tokens ?? [] };
  }

  /** The token ids of one user message in the model's template. */
  async chatIds(text) {
    return (await ask("../tokenize", { messages: [{ role: "user", content: text }] })).tokens;
  }
}

/** One recorded distribution of a real model, for a page without a server. */
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

/** The served model as `Live`, or the state of a server without one ("loading", …). */
export async function connect() {
  const model = await ask("api/model");
  if (!model.vocab_size) return model.state;
  return new Live(model, await ask("api/vocab"));
}

/** The recording. */
export async function recording() {
  const response = await fetch("recorded.bin");
  const plain = response.body.pipeThrough(new DecompressionStream("gzip"));
  return new Recorded(await new Response(plain).json());
}
