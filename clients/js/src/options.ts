// The arguments of `context.generate` as a server gets them; functions of the program's own stay here and get a number.

import { snake } from "./codec.js";
import { adapterList, type Context } from "./context.js";
import { Generation, Grammar, type BuiltinDrafter, type Constraint, type Drafter, type GenerateOptions, type Started } from "./generation.js";
import type { Sampler } from "./samplers.js";

const RULE_MARGIN = 64; // rows beyond maxTokens for which a rule is computed
const DEFAULT_TOKENS = 256;

/** Begin a generation; what the server refuses is told by the first thing that is awaited of it. */
export function startGeneration(context: Context, sampler: Sampler | null, options: GenerateOptions): Generation<any> {
  const { engine } = context;
  const { stop, constrain, probe, attentionMask, logits, adapter, speculate, ...plain } = options;
  const objects: number[] = [];
  const keep = (thing: unknown): number => {
    const number = engine.callables.add(thing);
    objects.push(number);
    return number;
  };
  const given: Record<string, unknown> = Object.fromEntries(
    Object.entries(plain)
      .filter(([, value]) => value !== undefined)
      .map(([name, value]) => [snake(name), value]),
  );
  if (sampler !== null) given.sampler = sampler;
  if (stop !== undefined) given.stop = typeof stop === "string" ? [stop] : stop;
  if (probe !== undefined) given.probe = Array.isArray(probe) ? probe.map((one) => one.spec) : probe.spec;
  if (adapter !== undefined) given.adapter = adapterList(adapter);
  if (constrain !== undefined) given.constrain = constraintJson(constrain, keep);
  if (speculate !== undefined) given.speculate = drafterJson(speculate, keep);
  if (logits !== undefined) given.logits = keep(logits);
  const generation = engine.newNumber();
  context.settle();
  const begin = (mask: object): Promise<Started> =>
    engine.connection.request("generation.new", { context: context.number, generation, options: { ...given, ...mask } });
  const rows = (options.maxTokens ?? options.maxLength ?? DEFAULT_TOKENS) + RULE_MARGIN;
  const started =
    attentionMask === undefined
      ? begin({})
      : attentionMask.needsPositions
        ? context.maskJson(attentionMask, rows).then((json) => begin({ attention_mask: json }))
        : begin({ attention_mask: attentionMask.json() });
  return new Generation(context, generation, probe ?? null, objects.length > 0, started, objects);
}

function constraintJson(constrain: Grammar | Constraint, keep: (thing: unknown) => number): object {
  if (constrain instanceof Grammar) return { grammar: constrain.json() };
  return { object: keep(constrain), copy: constrain.copy !== undefined, name: nameOf(constrain) };
}

function drafterJson(drafter: Drafter | BuiltinDrafter, keep: (thing: unknown) => number): object {
  if ("builtin" in drafter) {
    const options = Object.entries(drafter.options).map(([name, value]) => [snake(name), value]);
    return { [drafter.builtin]: Object.fromEntries(options) };
  }
  const own = { copy: drafter.copy !== undefined, name: nameOf(drafter), adaptive: drafter.adaptive ?? true, draws: false };
  return { object: keep(drafter), ...own };
}

function nameOf(thing: object): string {
  const name = thing.constructor?.name ?? "";
  return /^[A-Za-z_]\w{0,79}$/.test(name) ? name : "Object";
}
