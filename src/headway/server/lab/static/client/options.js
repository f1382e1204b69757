// The arguments of `context.generate` as a server gets them; functions of the program's own stay here and get a number.
import { snake } from "./codec.js";
import { adapterList } from "./context.js";
import { Generation, Grammar } from "./generation.js";
const RULE_MARGIN = 64; // rows beyond maxTokens for which a rule is computed
const DEFAULT_TOKENS = 256;
/** Begin a generation; what the server refuses is told by the first thing that is awaited of it. */
export function startGeneration(context, sampler, options) {
    const { engine } = context;
    const { stop, constrain, probe, attentionMask, logits, adapter, speculate, ...plain } = options;
    const objects = [];
    const keep = (thing) => {
        const number = engine.callables.add(thing);
        objects.push(number);
        return number;
    };
    const given = Object.fromEntries(Object.entries(plain)
        .filter(([, value]) => value !== undefined)
        .map(([name, value]) => [snake(name), value]));
    if (sampler !== null)
        given.sampler = sampler;
    if (stop !== undefined)
        given.stop = typeof stop === "string" ? [stop] : stop;
    if (probe !== undefined)
        given.probe = Array.isArray(probe) ? probe.map((one) => one.spec) : probe.spec;
    if (adapter !== undefined)
        given.adapter = adapterList(adapter);
    if (constrain !== undefined)
        given.constrain = constraintJson(constrain, keep);
    if (speculate !== undefined)
        given.speculate = drafterJson(speculate, keep);
    if (logits !== undefined)
        given.logits = keep(logits);
    const generation = engine.newNumber();
    context.settle();
    const begin = (mask) => engine.connection.request("generation.new", { context: context.number, generation, options: { ...given, ...mask } });
    const rows = (options.maxTokens ?? options.maxLength ?? DEFAULT_TOKENS) + RULE_MARGIN;
    const started = attentionMask === undefined
        ? begin({})
        : attentionMask.needsPositions
            ? context.maskJson(attentionMask, rows).then((json) => begin({ attention_mask: json }))
            : begin({ attention_mask: attentionMask.json() });
    return new Generation(context, generation, probe ?? null, objects.length > 0, started, objects);
}
function constraintJson(constrain, keep) {
    if (constrain instanceof Grammar)
        return { grammar: constrain.json() };
    return { object: keep(constrain), copy: constrain.copy !== undefined, name: nameOf(constrain) };
}
function drafterJson(drafter, keep) {
    if ("builtin" in drafter) {
        const options = Object.entries(drafter.options).map(([name, value]) => [snake(name), value]);
        return { [drafter.builtin]: Object.fromEntries(options) };
    }
    const own = { copy: drafter.copy !== undefined, name: nameOf(drafter), adaptive: drafter.adaptive ?? true, draws: false };
    return { object: keep(drafter), ...own };
}
function nameOf(thing) {
    const name = thing.constructor?.name ?? "";
    return /^[A-Za-z_]\w{0,79}$/.test(name) ? name : "Object";
}
