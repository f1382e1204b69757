// `connect`: an engine that is on a server, with the shapes of Headway's Python API.

import { Callables } from "./callables.js";
import type { Chat } from "./chat.js";
import { camelKeys, type Message } from "./codec.js";
import { Connection } from "./connection.js";
import { Context } from "./context.js";
import { HeadwayError } from "./errors.js";
import type { Generation } from "./generation.js";
import type { Seed } from "./samplers.js";

export interface ConnectOptions {
  /** A key of the server; it is sent in the first message. */
  apiKey?: string;
  /** The name of one of the server's models; by default its first. */
  model?: string;
  /** Milliseconds that connecting may take. */
  timeout?: number;
}

export interface ContextOptions {
  seed?: Seed | null;
  priority?: number;
  salt?: string;
  tokenBudget?: number | null;
  deadline?: number | null;
}

/** The model's sizes. */
export interface Config {
  family: string;
  vocabSize: number;
  layers: number;
  hiddenSize: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  maxPositions: number;
}

export interface EngineStats {
  pagesTotal: number;
  pagesFree: number;
  pagesCached: number;
  pagesHeld: number;
  batchSizeMean: number;
  tokens: number;
  [figure: string]: unknown;
}

/** An engine on a server: `http(s)://HOST:PORT`, or in Node `unix:/FILE`. */
export async function connect(url: string, { apiKey, model, timeout = 30_000 }: ConnectOptions = {}): Promise<Engine> {
  const engine: { made?: Engine } = {};
  const first = { ...(apiKey === undefined ? {} : { key: apiKey }), ...(model === undefined ? {} : { model }) };
  const connection = await Connection.to(url, first, timeout, (message) => engine.made!.route(message), (error) => engine.made?.lose(error));
  return (engine.made = new Engine(connection));
}

/** A model on a server. Made by `connect`; `close` it. */
export class Engine {
  readonly config: Config;
  readonly info: Record<string, unknown>;
  readonly pageSize: number;
  readonly pages: number;
  readonly deterministic: boolean;
  readonly eosIds: readonly number[];
  readonly tokenizer: Tokenizer | null;
  /** @internal */ readonly callables = new Callables(() => this.newNumber());
  /** @internal */ readonly generations = new Map<number, WeakRef<Generation<any>>>();
  /** @internal */ readonly active = new Set<Generation<any>>();
  /** @internal */ readonly chats = new Map<number, Chat>();
  private numbers = 0;
  private told: Promise<unknown> = Promise.resolve(); // what the server asks is done in order

  /** @internal */
  constructor(/** @internal */ readonly connection: Connection) {
    const about = connection.welcome.engine;
    this.config = camelKeys<Config>(about.config);
    this.info = camelKeys(about.info);
    this.pageSize = about.page_size;
    this.pages = about.pages;
    this.deterministic = about.deterministic;
    this.eosIds = about.eos_ids;
    this.tokenizer = about.tokenizer === null ? null : new Tokenizer(connection, about.tokenizer.vocab_size, about.tokenizer.bos_id);
  }

  /** V: the width of the logits. */
  get vocabSize(): number {
    return this.config.vocabSize;
  }

  /** An empty context. */
  context({ seed = null, priority = 0, salt = "", tokenBudget = null, deadline = null }: ContextOptions = {}): Context {
    this.checkOpen();
    const context = this.newNumber();
    this.connection.tell("context.new", { context, seed, priority, salt, token_budget: tokenBudget, deadline });
    return new Context(this, context);
  }

  /** A fork of the context saved under a name, or null. */
  open(name: string): Promise<Context | null> {
    return this.opened("engine.open", name);
  }

  /** The context saved under a name, which is then no longer saved; or null. */
  take(name: string): Promise<Context | null> {
    return this.opened("engine.take", name);
  }

  /** Forget the context saved under a name; false when there was none. */
  delete(name: string): Promise<boolean> {
    return this.connection.request("engine.delete", { name });
  }

  private async opened(verb: string, name: string): Promise<Context | null> {
    const context = this.newNumber();
    return (await this.connection.request(verb, { name, context })) ? new Context(this, context) : null;
  }

  /** The LoRA adapters of the server by name, each with its scale. */
  adapters(): Promise<Record<string, number>> {
    return this.connection.request("engine.adapters");
  }

  /** Pages now, and steps and tokens so far, of all programs of the engine. */
  async stats(): Promise<EngineStats> {
    return camelKeys<EngineStats>(await this.connection.request("engine.stats"));
  }

  /** Whether passes can be sent. */
  get alive(): boolean {
    return this.connection.lost === null;
  }

  /** End the session: the server releases its contexts. */
  close(): void {
    this.connection.close();
  }

  /** @internal */
  newNumber(): number {
    return ++this.numbers;
  }

  /** @internal */
  checkOpen(): void {
    this.connection.checkOpen();
  }

  /** @internal A step, or something that the server asks of the program. */
  route(message: Message): void {
    if (message.type === "step") return this.generations.get(message.generation)?.deref()?.arrived(message);
    if (message.method === "drop") return this.callables.drop([message.object]);
    if (message.method === "tool") return void this.answer(message, this.chats.get(message.generation)?.run(message.args) ?? Promise.reject(gone()));
    this.told = this.told.then(() => this.answer(message, this.callables.call(message, this.generations.get(message.generation)?.deref())));
  }

  private async answer({ id }: Message, result: Promise<unknown>): Promise<void> {
    try {
      const value = await result;
      if (id !== undefined) this.connection.give(id, value ?? null);
    } catch (error) {
      if (id !== undefined && this.connection.lost === null) this.connection.fail(id, error);
    }
  }

  /** @internal */
  lose(error: HeadwayError): void {
    for (const generation of this.generations.values()) generation.deref()?.lost(error);
  }
}

const gone = (): HeadwayError => new HeadwayError("the program has let go of this chat", "Closed");

/** The model's tokenizer, on the server. */
export class Tokenizer {
  private names: Promise<(string | null)[]> | null = null;

  /** @internal */
  constructor(
    private readonly connection: Connection,
    readonly vocabSize: number,
    readonly bosId: number | null,
  ) {}

  /** The name of every token, by id; null where an id has no token. */
  vocabulary(): Promise<(string | null)[]> {
    return (this.names ??= this.connection.request("engine.vocabulary"));
  }

  /** The ids of a text; names of special tokens in it are plain text unless `special`. */
  encode(text: string, { special = false }: { special?: boolean } = {}): Promise<number[]> {
    return this.connection.request("engine.encode", { text, special });
  }

  /** The text of ids. */
  decode(ids: Iterable<number>, { skipSpecial = false }: { skipSpecial?: boolean } = {}): Promise<string> {
    return this.connection.request("engine.decode", { ids: [...ids], skip_special: skipSpecial });
  }

  /** One token, for people to read. */
  async tokenText(id: number): Promise<string> {
    return (await this.connection.request("engine.token", { id }))[0];
  }

  /** The bytes that a token stands for. */
  async tokenBytes(id: number): Promise<Uint8Array> {
    return Uint8Array.from((await this.connection.request("engine.token", { id }))[1]);
  }
}
