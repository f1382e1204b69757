// Many passes: steps arrive ahead of the program, and those it does not take are undone on the server.

import { camelKeys, numberOf, type Message } from "./codec.js";
import { Context, type Adapter } from "./context.js";
import { HeadwayError } from "./errors.js";
import type { Mask } from "./masks.js";
import type { Probe } from "./probes.js";
import type { FilterOptions, Seed } from "./samplers.js";

const WINDOW = 32; // steps that a server may be ahead

/** One step of a generation: usually one token. */
export interface Step<P = unknown> {
  tokens: number[];
  text: string;
  /** What the probe read before each token. */
  probes: P[];
  finish: string | null;
  /** Characters of earlier texts that are taken back: a stop began in them. */
  retracted: number;
  drafted: number;
  accepted: number;
}

/** One of several sequences. */
export interface Continuation<P = unknown> {
  tokens: number[];
  text: string;
  finish: string;
  score: number;
  seed: Seed | null;
  probes: P[];
}

/** What a text must match. */
export class Grammar {
  private constructor(
    private readonly kind: string,
    private readonly text: string,
  ) {}

  /** JSON of a schema. */
  static jsonSchema(schema: object | string): Grammar {
    return new Grammar("json", typeof schema === "string" ? schema : JSON.stringify(schema));
  }

  static regex(pattern: string): Grammar {
    return new Grammar("regex", pattern);
  }

  static lark(grammar: string): Grammar {
    return new Grammar("lark", grammar);
  }

  /** One of these texts. */
  static choices(texts: Iterable<string>): Grammar {
    return new Grammar("choices", JSON.stringify([...texts]));
  }

  /** @internal */
  json(): unknown {
    return [this.kind, this.text, false];
  }
}

/** A constraint of the program's own; it runs here and costs a round trip for each token. */
export interface Constraint {
  /** One bit a token in uint32 words, 1 = allowed; null: all. */
  mask(): Uint32Array | null;
  accept(token: number): void;
  rollback(n: number): void;
  copy?(): Constraint;
  forced?(): number[];
  readonly mayEnd?: boolean;
  readonly finished?: boolean;
}

/** A drafter of the program's own. */
export interface Drafter {
  draft(tokens: number[], limit: number): Iterable<number> | Promise<Iterable<number>>;
  accept(tokens: number[]): void;
  copy?(): Drafter;
  readonly adaptive?: boolean;
}

/** Drafters that the server has. */
export const PromptLookup = (options: { maxTokens?: number; minNgram?: number; maxNgram?: number; window?: number; adaptive?: boolean } = {}) =>
  ({ builtin: "prompt_lookup", options }) as const;
export const OwnLayers = (layers: number, options: { maxTokens?: number; adaptive?: boolean } = {}) =>
  ({ builtin: "own_layers", options: { layers, ...options } }) as const;
export type BuiltinDrafter = { readonly builtin: string; readonly options: object };

export interface GenerateOptions extends FilterOptions {
  maxTokens?: number;
  maxLength?: number;
  minTokens?: number;
  minLength?: number;
  doSample?: boolean;
  noRepeatNgramSize?: number;
  badWordsIds?: number[][];
  sequenceBias?: [number[], number][];
  numBeams?: number;
  lengthPenalty?: number;
  earlyStopping?: boolean | "never";
  numReturnSequences?: number;
  stop?: string | (string | number)[];
  stopOnly?: boolean;
  constrain?: Grammar | Constraint;
  probe?: Probe<any> | Probe<any>[];
  attentionMask?: Mask;
  penalizePrompt?: boolean;
  /** Between a row's logits and its draw: change the array, or return another. */
  logits?: (logits: Float32Array, generation: Generation<any>) => void | Float32Array | Promise<void | Float32Array>;
  adapter?: Adapter;
  speculate?: Drafter | BuiltinDrafter;
  verify?: "match" | "rejection";
}

/** @internal What a generation is made of. */
export interface Started {
  seed: Seed;
  several: boolean;
}

type Taker = { resolve: (step: Message) => void; reject: (error: unknown) => void };

/** An async iterator of steps, computed on a server. */
export class Generation<P = unknown> implements AsyncIterable<Step<P>> {
  finish: string | null = null;
  /** The stop string that ended it, which is not in its text. */
  stopString: string | null = null;
  /** The seed of its samples; known once it has begun. */
  seed: Seed | null = null;
  private readonly steps: Message[] = [];
  private taker: Taker | null = null;
  private readonly progress = { taken: 0 }; // steps that the program has
  private upto = 0;
  private epoch = 0;
  private window = 1;
  private several = false;
  private results: Continuation<P>[] | null = null;
  private failure: unknown = null;

  /** @internal */
  constructor(
    readonly context: Context,
    /** @internal */ readonly number: number,
    private readonly probe: Probe<any> | Probe<any>[] | null,
    private readonly patient: boolean,
    private readonly started: Promise<Started>,
    objects: number[],
  ) {
    started.then(
      ({ seed, several }) => ([this.seed, this.several] = [seed, several]),
      (error) => (this.failure = error),
    );
    context.generations.add(new WeakRef(this));
    context.engine.generations.set(number, new WeakRef(this));
    dropped.register(this, { engine: context.engine, number, objects, progress: this.progress });
  }

  // -- running ----------------------------------------------------------------------------------------------------------

  async *[Symbol.asyncIterator](): AsyncGenerator<Step<P>, void, void> {
    for (;;) {
      const step = await this.next();
      if (step === null) return;
      yield step;
    }
  }

  /** The next step; null after the last. */
  async next(): Promise<Step<P> | null> {
    await this.started;
    if (this.several) {
      if (this.results !== null) return null;
      const [first] = await this.sequences();
      return { ...first!, finish: first!.finish, retracted: 0, drafted: 0, accepted: 0 };
    }
    if (this.finish !== null) return null;
    this.context.checkOpen();
    this.context.settle(this);
    this.pull();
    this.context.engine.active.add(this); // or it might be collected while the program waits for it
    try {
      const message = await new Promise<Message>((resolve, reject) => {
        this.taker = { resolve, reject };
        this.deliver();
      });
      return this.read(message);
    } finally {
      this.context.engine.active.delete(this);
    }
  }

  private pull(): void {
    if (this.upto - this.progress.taken > this.window >> 1) return;
    this.window = this.patient || this.upto === 0 ? 1 : Math.min(2 * this.window, WINDOW);
    this.upto = this.progress.taken + this.window;
    this.context.connection.tell("generation.pull", { generation: this.number, upto: this.upto, taken: this.progress.taken });
  }

  /** @internal A step has come. */
  arrived(message: Message): void {
    this.steps.push(message);
    this.deliver();
  }

  /** @internal The connection is lost. */
  lost(error: unknown): void {
    this.taker?.reject(error);
    this.taker = null;
  }

  private deliver(): void {
    while (this.taker !== null && this.steps.length) {
      const message = this.steps.shift()!;
      if (message.epoch !== this.epoch && message.epoch !== null) continue; // it was taken back
      const taker = this.taker;
      this.taker = null;
      if (message.error !== undefined) {
        [this.upto, this.window] = [this.progress.taken, 1];
        taker.reject(this.context.connection.error(message.error));
      } else {
        this.progress.taken = message.number;
        taker.resolve(message);
      }
    }
  }

  private read(message: any): Step<P> {
    const { tokens, text, probes = [], finish = null, retracted = 0, drafted = 0, accepted = 0 } = message;
    if (finish !== null) [this.finish, this.stopString] = [finish, message.stop_string ?? null];
    return { tokens, text, probes: probes.map((row: any) => this.probed(row)), finish, retracted, drafted, accepted };
  }

  private probed(value: any): P {
    if (Array.isArray(this.probe)) return this.probe.map((one, i) => one.read(value[i])) as P;
    return this.probe?.read(value) as P;
  }

  /** Run to the end; all tokens that stayed. */
  async tokens(): Promise<number[]> {
    await this.started;
    return this.several ? (await this.sequences())[0]!.tokens : (await this.collect("tokens")).generated;
  }

  /** Run to the end; the whole text. */
  async text(): Promise<string> {
    await this.started;
    return this.several ? (await this.sequences())[0]!.text : (await this.collect("text")).text;
  }

  /** Run to the end; the text as JSON. With a schema only such can come. */
  async json<T = unknown>(schema?: object | Grammar): Promise<T> {
    await this.started;
    const grammar = schema === undefined ? null : schema instanceof Grammar ? schema : Grammar.jsonSchema(schema);
    const { text, finish } = await this.collect("text", grammar?.json() ?? null);
    try {
      return JSON.parse(text) as T;
    } catch {
      throw new HeadwayError(`the text is not valid JSON (finish ${finish}): ${text.slice(0, 80)}`, "InvalidInput");
    }
  }

  /** Run to the end; every sequence of several, the best first. */
  async sequences(): Promise<Continuation<P>[]> {
    await this.started;
    if (this.results === null) {
      const state = await this.ask("sequences");
      this.note(state);
      this.results = state.sequences.map((one: any) => ({ ...one, score: numberOf(one.score), probes: one.probes.map((row: any) => this.probed(row)) }));
    }
    return this.results!;
  }

  /** Run to the end; a context for every sequence, of which the first is this one's. */
  async contexts(): Promise<Context[]> {
    const contexts = (await this.sequences()).slice(1).map(() => this.context.engine.newNumber());
    const count: number = await this.ask("contexts", { contexts });
    return [this.context, ...contexts.slice(0, count).map((number) => new Context(this.context.engine, number))];
  }

  private async collect(what: string, schema: unknown = null): Promise<any> {
    this.context.settle(this);
    this.restart();
    const reply = await this.context.connection.request("generation.collect", { generation: this.number, what, taken: this.progress.taken, epoch: this.epoch, schema });
    this.note(reply);
    return reply;
  }

  // -- by hand ----------------------------------------------------------------------------------------------------------

  /** The tokens so far: sampled, forced or accepted, and not cut since. */
  async generated(): Promise<number[]> {
    return (await this.ask("state")).generated;
  }

  /** Rounds, drafts and accepted drafts so far; null where it does not speculate. */
  async speculation(): Promise<{ rounds: number; drafted: number; accepted: number } | null> {
    const { speculation } = await this.ask("state");
    return speculation === null ? null : camelKeys(speculation);
  }

  /** Add tokens by hand, as if they had been sampled. */
  async accept(tokens: Iterable<number>): Promise<Step<P>> {
    const reply = await this.ask("accept", { tokens: [...tokens], followed: false });
    this.note(reply);
    return this.read(reply.step);
  }

  /** Tokens that the constraint forces. */
  forced(): Promise<number[]> {
    return this.ask("forced");
  }

  /** Sample the tokens that follow with another seed, or with fresh entropy. */
  async reseed(seed: Seed | null = null): Promise<void> {
    this.seed = await this.ask("reseed", { seed });
  }

  /** Go on after an end, with the context as it is now. */
  async resume(maxTokens: number | null = null): Promise<void> {
    await this.ask("resume", { max_tokens: maxTokens });
    this.finish = this.stopString = null;
  }

  /** A second generation that goes on from here, on a fork of the context. */
  async fork({ seed = null }: { seed?: Seed | null } = {}): Promise<Generation<P>> {
    const [fork, context] = [this.context.engine.newNumber(), this.context.engine.newNumber()];
    const reply = await this.ask("fork", { fork, context, seed });
    const started = Promise.resolve({ seed: reply.seed, several: this.several });
    const objects = reply.object === null ? [] : [reply.object];
    const twin = new Generation<P>(new Context(this.context.engine, context), fork, this.probe, this.patient, started, objects);
    [twin.finish, twin.stopString] = [reply.finish, this.stopString];
    return twin;
  }

  // -- messages ---------------------------------------------------------------------------------------------------------

  private async ask(verb: string, args: object = {}): Promise<any> {
    await this.started;
    this.context.checkOpen();
    this.context.settle();
    return this.context.connection.request(`generation.${verb}`, { generation: this.number, ...args });
  }

  /** @internal Have the server take back what the program has not taken. */
  settle(): void {
    if (this.taker !== null || this.upto <= this.progress.taken || this.failure !== null) return;
    this.restart();
    this.context.connection.tell("generation.settle", { generation: this.number, taken: this.progress.taken, epoch: this.epoch });
  }

  private restart(): void {
    this.epoch++;
    [this.upto, this.window] = [this.progress.taken, 1];
    this.steps.length = 0;
  }

  private note(state: any): void {
    [this.finish, this.stopString, this.seed] = [state.finish, state.stop_string, state.seed];
  }
}

type Dropped = { engine: Context["engine"]; number: number; objects: number[]; progress: { taken: number } };

/** Generations that the program has let go of: what it has not taken is undone. */
const dropped = new FinalizationRegistry(({ engine, number, objects, progress }: Dropped) => {
  engine.generations.delete(number);
  engine.callables.drop(objects);
  engine.connection.tell("generation.drop", { generation: number, taken: progress.taken });
});
