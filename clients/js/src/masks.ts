// Attention masks: what rows attend to, symbolically. A rule's function runs here, and its rows travel as runs.

import { HeadwayError } from "./errors.js";

/** Whether a row attends to each slot: `row` is its position id, `slots` are those of the slots it may see. */
export type RuleFunction = (row: number, slots: readonly number[]) => ArrayLike<boolean | number>;

type Rule =
  | ["causal"]
  | ["window", number]
  | ["sink", number, number]
  | ["blocks", number[], [number, number][]]
  | ["raw", number[][], "runs" | "booleans", boolean]
  | ["not", Rule]
  | ["all", Rule[]]
  | ["either", Rule[]]
  | RuleFunction;

/** The rows that a mask is for: the position ids of all slots, the first of the rows, how many, and what they see. */
export interface RowPlaces {
  positions: number[];
  first: number;
  rows: number;
  /** From this slot on rows see all slots (`causal: false`). */
  whole?: number;
}

/** What each row attends to. Masks combine with `and`, `or` and `not`. */
export class Mask {
  private constructor(private readonly rule: Rule) {}

  /** Every earlier slot. */
  static causal(): Mask {
    return new Mask(["causal"]);
  }

  /** The last n slots, the row's own among them. */
  static window(n: number): Mask {
    return new Mask(["window", n]);
  }

  /** The first `sink` slots and the last `window`. */
  static sink(sink: number, window: number): Mask {
    return new Mask(["sink", sink, window]);
  }

  /** Blocks that see themselves, and those that `sees` names as [viewer, seen]. */
  static blocks(lengths: Iterable<number>, sees: Iterable<[number, number]> = []): Mask {
    return new Mask(["blocks", [...lengths], [...sees]]);
  }

  /** Raw runs, one list a row: zeros first, 0 = attend, 1 = masked. */
  static fromRuns(rows: Iterable<Iterable<number>>): Mask {
    return new Mask(["raw", [...rows].map((row) => flipped([...row])), "runs", false]);
  }

  /** One list of booleans a row: whether it attends to each slot. */
  static fromBool(attend: Iterable<ArrayLike<boolean>>): Mask {
    const rows = [...attend];
    return new Mask(["raw", rows.map(runsOf), "booleans", rows.every((row) => row.length === rows[0]!.length)]);
  }

  /** Whatever a function says of the row's position id and those of the slots. */
  static rule(attends: RuleFunction): Mask {
    return new Mask(attends);
  }

  and(other: Mask): Mask {
    return new Mask(["all", [this.rule, other.rule]]);
  }

  or(other: Mask): Mask {
    return new Mask(["either", [this.rule, other.rule]]);
  }

  not(): Mask {
    return new Mask(["not", this.rule]);
  }

  /** Whether it has a function, which is asked for the rows before the mask is sent. */
  get needsPositions(): boolean {
    return hasFunction(this.rule);
  }

  /** The mask as the protocol has it. */
  json(places: RowPlaces | null = null): unknown {
    return json(this.rule, places);
  }
}

function hasFunction(rule: Rule): boolean {
  if (typeof rule === "function") return true;
  if (rule[0] === "not") return hasFunction(rule[1]);
  return (rule[0] === "all" || rule[0] === "either") && rule[1].some(hasFunction);
}

function json(rule: Rule, places: RowPlaces | null): unknown {
  if (typeof rule === "function") return ["rows", rowsOf(rule, places!)];
  if (rule[0] === "not") return ["not", json(rule[1], places)];
  if (rule[0] === "all" || rule[0] === "either") return [rule[0], rule[1].map((part) => json(part, places))];
  return rule;
}

function rowsOf(attends: RuleFunction, { positions, first, rows, whole }: RowPlaces): [number, number[]][] {
  return Array.from({ length: rows }, (_, row) => {
    const slot = first + row;
    const seen = whole === undefined || slot < whole ? positions.slice(0, slot + 1) : positions;
    const bits = attends(positions[slot]!, seen);
    if (bits.length !== seen.length) {
      throw new HeadwayError(`the mask's rule gave ${bits.length} values for ${seen.length} slots; give one for each`, "InvalidMask");
    }
    return [positions[slot]!, runsOf(bits)];
  });
}

/** Bits as alternating runs, zeros first. */
export function runsOf(bits: ArrayLike<boolean | number>): number[] {
  const runs = [0];
  let last = false;
  for (let i = 0; i < bits.length; i++) {
    const bit = Boolean(bits[i]);
    if (bit !== last) {
      runs.push(0);
      last = bit;
    }
    runs[runs.length - 1]!++;
  }
  return runs;
}

function flipped(runs: number[]): number[] {
  return runs[0] === 0 ? runs.slice(1) : [0, ...runs];
}
