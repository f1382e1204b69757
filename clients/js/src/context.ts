// A context: one sequence whose pages are on the server. Verbs are sent in the order in which they are called, so that
// a program need not await one before it calls the next; awaiting it tells whether it failed.

import type { Connection } from "./connection.js";
import { Chat, type ChatOptions } from "./chat.js";
import type { Engine } from "./engine.js";
import { HeadwayError } from "./errors.js";
import { Forward } from "./forward.js";
import { Generation, type GenerateOptions } from "./generation.js";
import { Mask } from "./masks.js";
import { startGeneration } from "./options.js";
import { Pages } from "./pages.js";
import type { Sampler, Seed } from "./samplers.js";

/** LoRA adapters by name, each with a scale. */
export type Adapter = string | [string, number] | (string | [string, number])[];

export interface ContextState {
  seqLen: number;
  pending: number[];
  nextPosition: number;
  cachedTokens: number;
  seed: Seed | null;
  textStart: number;
}

export class Context {
  private released = false;
  /** @internal */ readonly generations = new Set<WeakRef<Generation<any>>>();

  /** @internal */
  constructor(
    readonly engine: Engine,
    /** @internal */ readonly number: number,
  ) {
    lost.register(this, { connection: engine.connection, number }, this);
  }

  /** @internal */
  get connection(): Connection {
    return this.engine.connection;
  }

  // -- writing ----------------------------------------------------------------------------------------------------------

  /** Append text or token ids to the pending buffer; nothing is computed yet. */
  fill(text: string | Iterable<number>, { special = false }: { special?: boolean } = {}): Promise<void> {
    return this.ask("fill", { text: typeof text === "string" ? text : [...text], special });
  }

  /** Append a system message through the model's chat template. */
  system(text: string): Promise<void> {
    return this.ask("say", { role: "system", text });
  }

  /** Append a user message. */
  user(text: string): Promise<void> {
    return this.ask("say", { role: "user", text });
  }

  /** Append an assistant message, closed. */
  assistant(text: string): Promise<void> {
    return this.ask("say", { role: "assistant", text });
  }

  /** Append the generation prompt. */
  cue(): Promise<void> {
    return this.ask("cue");
  }

  /** Append what the template puts after an assistant text. */
  seal(): Promise<void> {
    return this.ask("seal");
  }

  /** The priority of this context's passes, from -1000 to 1000. */
  setBid(bid: number): Promise<void> {
    return this.ask("bid", { bid });
  }

  // -- reading ----------------------------------------------------------------------------------------------------------

  /** Lengths, pending tokens, the next position, the seed. */
  async state(): Promise<ContextState> {
    const { seq_len, pending, next_position, cached_tokens, seed, text_start } = await this.ask("state");
    return { seqLen: seq_len, pending, nextPosition: next_position, cachedTokens: cached_tokens, seed, textStart: text_start };
  }

  /** Every token of the sequence, pending ones last. */
  tokens(): Promise<number[]> {
    return this.ask("tokens");
  }

  /** The chat so far. */
  messages(): Promise<Record<string, unknown>[]> {
    return this.ask("messages");
  }

  /** @internal */
  positions(): Promise<{ positions: number[]; pending: number; next: number }> {
    return this.ask("positions");
  }

  // -- computing --------------------------------------------------------------------------------------------------------

  /** A new pass over this context. */
  forward(): Forward {
    this.checkOpen();
    return new Forward(this);
  }

  /** Compute the pending tokens. */
  async flush({ attentionMask, adapter }: { attentionMask?: Mask | Iterable<Iterable<number>>; adapter?: Adapter } = {}): Promise<void> {
    const mask = attentionMask === undefined || attentionMask instanceof Mask ? attentionMask : Mask.fromRuns(attentionMask);
    const args = { number: this.engine.newNumber(), attention_mask: mask === undefined ? null : await this.maskJson(mask, 0) };
    await this.ask("flush", { ...args, adapter: adapterList(adapter) });
  }

  /** Many passes: an async iterator of steps; `await generation.text()` collects. */
  generate(sampler?: Sampler | null, options: GenerateOptions = {}): Generation<any> {
    this.checkOpen();
    return startGeneration(this, sampler ?? null, options);
  }

  /** Append messages and get the reply, with tools that run here: an async iterator of parts. */
  chat(messages: string | object | object[] | null, options: ChatOptions = {}): Chat {
    this.checkOpen();
    return new Chat(this, messages, options);
  }

  /** @internal */
  async maskJson(mask: Mask, more: number): Promise<unknown> {
    if (!mask.needsPositions) return mask.json();
    const { positions, pending, next } = await this.positions();
    const first = positions.length;
    for (let at = next - pending; at < next + more; at++) positions.push(at);
    return mask.json({ positions, first, rows: positions.length - first });
  }

  // -- changing ---------------------------------------------------------------------------------------------------------

  /** A second context that shares every committed page and has copies of the rest. */
  async fork(): Promise<Context> {
    const fork = this.engine.newNumber();
    await this.ask("fork", { fork });
    return new Context(this.engine, fork);
  }

  /** Drop the last n tokens, pending ones first. */
  truncate(n: number): Promise<void> {
    return this.ask("truncate", { n });
  }

  /** Keep this context on the server under a name; `engine.open(name)` gives forks. */
  save(name: string, { durable = false }: { durable?: boolean } = {}): Promise<void> {
    return this.ask("save", { name, durable });
  }

  /** The raw page operations. */
  inner(): Pages {
    this.checkOpen();
    return new Pages(this);
  }

  /** Release the pages; the context cannot be used after. */
  release(): void {
    if (this.released) return;
    this.released = true;
    lost.unregister(this);
    this.connection.tell("context.release", { context: this.number });
  }

  // -- messages ---------------------------------------------------------------------------------------------------------

  /** @internal A verb of this context, and its reply. */
  async ask(verb: string, args: object = {}, group = "context"): Promise<any> {
    this.checkOpen();
    this.settle();
    return this.connection.request(`${group}.${verb}`, { context: this.number, ...args });
  }

  /** @internal Take back what generations run ahead, so that the context is seen as it is between two steps. */
  settle(but: unknown = null): void {
    for (const each of this.generations) {
      const generation = each.deref();
      if (generation === undefined) this.generations.delete(each);
      else if (generation !== but) generation.settle();
    }
  }

  /** @internal */
  checkOpen(): void {
    this.engine.checkOpen();
    if (this.released) throw new HeadwayError("this context was released; create a new one with engine.context()", "Closed");
  }
}

/** Contexts that the program has lost are released. */
const lost = new FinalizationRegistry(({ connection, number }: { connection: Connection; number: number }) => {
  connection.tell("context.release", { context: number });
});

/** @internal */
export function adapterList(given: Adapter | undefined): [string, number][] | null {
  if (given === undefined) return null;
  if (typeof given === "string") return [[given, 1]];
  if (given.length === 2 && typeof given[1] === "number") return [given as [string, number]];
  return (given as (string | [string, number])[]).map((one) => (typeof one === "string" ? [one, 1] : one));
}
