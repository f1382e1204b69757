// What a program gives a generation and keeps here: its own constraint, drafter and hooks, called for the server.

import type { Message } from "./codec.js";
import { HeadwayError } from "./errors.js";
import type { Constraint, Drafter, Generation } from "./generation.js";

type LogitsHook = (logits: Float32Array, generation: unknown) => void | Float32Array | Promise<void | Float32Array>;

/** The objects of one connection, by number; those that the server names, copies, have negative ones. */
export class Callables {
  private readonly objects = new Map<number, any>();

  constructor(private readonly newNumber: () => number) {}

  add(thing: unknown): number {
    const number = this.newNumber();
    this.objects.set(number, thing);
    return number;
  }

  drop(numbers: Iterable<number>): void {
    for (const number of numbers) this.objects.delete(number);
  }

  /** Do what the server asks. */
  async call({ method, object, args }: Message, generation: Generation<any> | undefined): Promise<unknown> {
    const thing: unknown = this.objects.get(object);
    if (thing === undefined) throw new HeadwayError("the program has let go of what the server asks for", "Unsupported");
    switch (method) {
      case "follow":
        follow(thing as Constraint, args[0]);
        return state(thing as Constraint);
      case "copy":
        follow(thing as Constraint, args[1]);
        this.objects.set(args[0], (thing as Constraint).copy!());
        return null;
      case "draft":
        return [Array.from(await (thing as Drafter).draft(Array.from(args[0] as Int32Array), args[1])), null, null, 0, 0.7];
      case "accept":
        return (thing as Drafter).accept(Array.from(args[0] as Int32Array));
      case "logits":
        return changed(thing as LogitsHook, args[0], args.length > 1 ? { generated: args[2] } : generation);
      default:
        throw new HeadwayError(`the server asks for ${method}, which this client does not know`, "Unsupported");
    }
  }
}

function follow(constraint: Constraint, since: ["accept" | "rollback", number][]): void {
  for (const [verb, value] of since) constraint[verb](value);
}

function state(constraint: Constraint): object {
  return {
    mask: constraint.mask(),
    forced: constraint.forced?.() ?? [],
    may_end: constraint.mayEnd ?? true,
    finished: constraint.finished ?? false,
  };
}

async function changed(hook: LogitsHook, logits: Float32Array, generation: unknown): Promise<Float32Array> {
  return (await hook(logits, generation)) ?? logits;
}
