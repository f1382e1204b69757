// One forward pass: the builder notes what it is told, and `execute` sends it in one message.

import { camelKeys } from "./codec.js";
import type { Context } from "./context.js";
import { HeadwayError } from "./errors.js";
import { Mask, runsOf } from "./masks.js";
import type { Probe } from "./probes.js";
import type { Sampler, Seed } from "./samplers.js";

/** Names the tokens that one `sample` call draws. */
export class SampleHandle {
  constructor(
    readonly owner: Forward,
    readonly ask: number,
    readonly count: number,
  ) {}
}

/** Names what one `probe` call reads. */
export class ProbeHandle<T> {
  constructor(
    readonly owner: Forward,
    readonly ask: number,
    readonly probe: Probe<T>,
  ) {}
}

/** The figures of a pass. */
export interface PassStats {
  rows: number;
  pages: number;
  pagesTrimmed: number;
  cacheHits: number;
  batchSize: number;
  seconds: number;
  seeds: Seed[];
}

/** Which tokens samplers may choose, in one of several forms. */
export interface LogitMask {
  /** Alternating runs over all tokens, zeros first, 1 = allowed. */
  runs?: Iterable<number>;
  allow?: Iterable<number>;
  forbid?: Iterable<number>;
  /** The rows it binds; all of them unless given. */
  rows?: Iterable<number>;
}

/** The results of one pass. */
export class Output {
  constructor(
    private readonly owner: Forward,
    private readonly values: any[],
    /** Rows, pages, cache hits, time, seeds. */
    readonly stats: PassStats,
  ) {}

  /** The token that a `sample` of one row has drawn. */
  token(handle: SampleHandle): number {
    return this.tokens(handle)[0]!;
  }

  /** The tokens that a `sample` has drawn, one a row. */
  tokens(handle: SampleHandle): number[] {
    return this.of(handle);
  }

  /** What a probe has read. */
  read<T>(handle: ProbeHandle<T>): T {
    return handle.probe.read(this.of(handle));
  }

  private of(handle: SampleHandle | ProbeHandle<any>): any {
    if (handle.owner !== this.owner) throw new HeadwayError("this handle belongs to another pass", "InvalidInput");
    return this.values[handle.ask];
  }
}

/** A pass that was sent: await it for its output. */
export class Execution implements Promise<Output> {
  readonly [Symbol.toStringTag] = "Execution";
  /** @internal */ cancelled = false;

  /** @internal */
  constructor(
    private readonly forward: Forward,
    private readonly output: Promise<Output>,
  ) {
    output.catch(() => {}); // whoever awaits it is told
  }

  then<A = Output, B = never>(
    done?: ((value: Output) => A | PromiseLike<A>) | null,
    failed?: ((error: unknown) => B | PromiseLike<B>) | null,
  ): Promise<A | B> {
    return this.output.then(done, failed);
  }

  catch<B = never>(failed?: ((error: unknown) => B | PromiseLike<B>) | null): Promise<Output | B> {
    return this.output.catch(failed);
  }

  finally(done?: (() => void) | null): Promise<Output> {
    return this.output.finally(done);
  }

  /** Undo the pass, if nothing was built on it. */
  cancel(): void {
    this.cancelled = true;
    this.forward.context.connection.tell("pass.cancel", { number: this.forward.number });
  }
}

/** One pass over a context: add inputs and readouts, then `await execute()`, once. */
export class Forward {
  /** @internal */ number = 0;
  private readonly operations: unknown[] = [];
  private readonly positions: (number | null)[] = []; // of the rows; null: the next one
  private attention: Mask | null = null;
  private causal = true;
  private asks = 0;
  private executed = false;

  /** @internal */
  constructor(readonly context: Context) {}

  /** Append tokens at the positions that follow, or those that an earlier pass samples. */
  input(tokens: Iterable<number> | SampleHandle): this {
    this.checkOpen();
    if (tokens instanceof SampleHandle) {
      if (tokens.owner.context !== this.context) throw new HeadwayError("this handle belongs to a pass over another context", "InvalidInput");
      if (!tokens.owner.executed) throw new HeadwayError("this handle's pass was not executed yet; call execute() on it first", "InvalidInput");
      this.operations.push(["feed", tokens.owner.number, tokens.ask]);
      for (let i = 0; i < tokens.count; i++) this.positions.push(null);
      return this;
    }
    const ids = [...tokens];
    this.operations.push(["input", ids]);
    for (const _ of ids) this.positions.push(null);
    return this;
  }

  /** Append tokens at explicit position ids: gaps, repeats and reorders are allowed. */
  inputAt(tokens: Iterable<number>, positions: Iterable<number>): this {
    this.checkOpen();
    const [ids, at] = [[...tokens], [...positions]];
    this.operations.push(["input_at", ids, at]);
    this.positions.push(...at);
    return this;
  }

  /** What each row attends to: a `Mask`, or raw runs, one list a row (zeros first, 0 = attend, 1 = masked). */
  attentionMask(mask: Mask | Iterable<Iterable<number>>, { causal = true }: { causal?: boolean } = {}): this {
    this.checkOpen();
    if (this.attention !== null) throw new HeadwayError("attentionMask was called twice; combine masks with and() and or()", "InvalidMask");
    this.attention = mask instanceof Mask ? mask : Mask.fromRuns(mask);
    this.causal = causal;
    return this;
  }

  /** Which tokens samplers may choose. Several calls are ANDed. */
  mask({ runs, allow, forbid, rows }: LogitMask): this {
    this.checkOpen();
    const width = this.context.engine.vocabSize;
    const row = rows === undefined ? null : [...rows];
    if (runs !== undefined) this.operations.push(["mask", [...runs], row]);
    if (allow !== undefined) this.operations.push(["mask", runsOf(marked(width, allow, 1)), row]);
    if (forbid !== undefined) this.operations.push(["mask", runsOf(marked(width, forbid, 0)), row]);
    return this;
  }

  /** Add an array to the logits before everything else that samplers do. */
  bias(values: Float64Array | number[], { rows }: { rows?: Iterable<number> } = {}): this {
    this.checkOpen();
    this.operations.push(["bias", Float64Array.from(values), rows === undefined ? null : [...rows]]);
    return this;
  }

  /** Compute this pass under a LoRA adapter of the server, by its name. Several add up. */
  adapter(name: string, scale = 1): this {
    this.checkOpen();
    this.operations.push(["adapter", name, scale]);
    return this;
  }

  /** Leave full pages working after the pass. */
  deferCommit(): this {
    this.checkOpen();
    this.operations.push(["defer_commit"]);
    return this;
  }

  /** Draw one token at each row; negative rows count from the end. */
  sample(rows: Iterable<number>, sampler: Sampler, { history, generated }: { history?: Iterable<number>; generated?: Iterable<number> } = {}): SampleHandle {
    this.checkOpen();
    const listed = [...rows];
    this.operations.push(["sample", listed, sampler, history === undefined ? null : [...history], generated === undefined ? null : [...generated]]);
    return new SampleHandle(this, this.asks++, listed.length);
  }

  /** Read something at a row without choosing a token. */
  probe<T>(row: number, probe: Probe<T>): ProbeHandle<T> {
    this.checkOpen();
    this.operations.push(["probe", row, probe.spec]);
    return new ProbeHandle(this, this.asks++, probe);
  }

  /** Send the pass now; await the execution for its `Output`. On any error the context is as it was. */
  execute(): Execution {
    this.checkOpen();
    this.context.checkOpen();
    this.executed = true;
    this.number = this.context.engine.newNumber();
    return new Execution(this, this.sent());
  }

  /** Send it at once, unless a rule must be asked first for rows that only the server knows. */
  private sent(): Promise<Output> {
    if (this.attention === null) return this.send([]);
    const [mask, causal] = [this.attention, this.causal];
    if (!mask.needsPositions) return this.send([["attention_mask", mask.json(), causal]]);
    return this.maskJson(mask).then((json) => this.send([["attention_mask", json, causal]]));
  }

  private async send(mask: unknown[]): Promise<Output> {
    this.context.settle();
    const args = { context: this.context.number, number: this.number, operations: [...this.operations, ...mask] };
    const { values, stats } = await this.context.connection.request("pass.execute", args);
    return new Output(this, values, camelKeys<PassStats>(stats));
  }

  private async maskJson(mask: Mask): Promise<unknown> {
    const { positions, pending, next } = await this.context.positions();
    const first = positions.length;
    for (let at = next - pending; at < next; at++) positions.push(at);
    let following = next;
    for (const given of this.positions) {
      const position = given ?? following;
      following = Math.max(following, position + 1);
      positions.push(position);
    }
    const whole = this.causal ? undefined : first + pending;
    return mask.json({ positions, first, rows: pending + this.positions.length, whole });
  }

  private checkOpen(): void {
    if (this.executed) throw new HeadwayError("this pass was executed before; build a new one with context.forward()", "Closed");
  }
}

function marked(width: number, ids: Iterable<number>, bit: 0 | 1): Uint8Array {
  const bits = new Uint8Array(width).fill(1 - bit);
  for (const id of ids) {
    if (!Number.isInteger(id) || id < 0 || id >= width) throw new HeadwayError(`token id ${id} is outside the vocabulary of ${width} tokens`, "InvalidToken");
    bits[id] = bit;
  }
  return bits;
}
