// Many passes: steps arrive ahead of the program, and those it does not take are undone on the server.
import { camelKeys, numberOf } from "./codec.js";
import { Context } from "./context.js";
import { HeadwayError } from "./errors.js";
const WINDOW = 32; // steps that a server may be ahead
/** What a text must match. */
export class Grammar {
    kind;
    text;
    constructor(kind, text) {
        this.kind = kind;
        this.text = text;
    }
    /** JSON of a schema. */
    static jsonSchema(schema) {
        return new Grammar("json", typeof schema === "string" ? schema : JSON.stringify(schema));
    }
    static regex(pattern) {
        return new Grammar("regex", pattern);
    }
    static lark(grammar) {
        return new Grammar("lark", grammar);
    }
    /** One of these texts. */
    static choices(texts) {
        return new Grammar("choices", JSON.stringify([...texts]));
    }
    /** @internal */
    json() {
        return [this.kind, this.text, false];
    }
}
/** Drafters that the server has. */
export const PromptLookup = (options = {}) => ({ builtin: "prompt_lookup", options });
export const OwnLayers = (layers, options = {}) => ({ builtin: "own_layers", options: { layers, ...options } });
/** An async iterator of steps, computed on a server. */
export class Generation {
    context;
    number;
    probe;
    patient;
    started;
    finish = null;
    /** The stop string that ended it, which is not in its text. */
    stopString = null;
    /** The seed of its samples; known once it has begun. */
    seed = null;
    steps = [];
    taker = null;
    progress = { taken: 0 }; // steps that the program has
    upto = 0;
    epoch = 0;
    window = 1;
    several = false;
    results = null;
    failure = null;
    /** @internal */
    constructor(context, 
    /** @internal */ number, probe, patient, started, objects) {
        this.context = context;
        this.number = number;
        this.probe = probe;
        this.patient = patient;
        this.started = started;
        started.then(({ seed, several }) => ([this.seed, this.several] = [seed, several]), (error) => (this.failure = error));
        context.generations.add(new WeakRef(this));
        context.engine.generations.set(number, new WeakRef(this));
        dropped.register(this, { engine: context.engine, number, objects, progress: this.progress });
    }
    // -- running ----------------------------------------------------------------------------------------------------------
    async *[Symbol.asyncIterator]() {
        for (;;) {
            const step = await this.next();
            if (step === null)
                return;
            yield step;
        }
    }
    /** The next step; null after the last. */
    async next() {
        await this.started;
        if (this.several) {
            if (this.results !== null)
                return null;
            const [first] = await this.sequences();
            return { ...first, finish: first.finish, retracted: 0, drafted: 0, accepted: 0 };
        }
        if (this.finish !== null)
            return null;
        this.context.checkOpen();
        this.context.settle(this);
        this.pull();
        this.context.engine.active.add(this); // or it might be collected while the program waits for it
        try {
            const message = await new Promise((resolve, reject) => {
                this.taker = { resolve, reject };
                this.deliver();
            });
            return this.read(message);
        }
        finally {
            this.context.engine.active.delete(this);
        }
    }
    pull() {
        if (this.upto - this.progress.taken > this.window >> 1)
            return;
        this.window = this.patient || this.upto === 0 ? 1 : Math.min(2 * this.window, WINDOW);
        this.upto = this.progress.taken + this.window;
        this.context.connection.tell("generation.pull", { generation: this.number, upto: this.upto, taken: this.progress.taken });
    }
    /** @internal A step has come. */
    arrived(message) {
        this.steps.push(message);
        this.deliver();
    }
    /** @internal The connection is lost. */
    lost(error) {
        this.taker?.reject(error);
        this.taker = null;
    }
    deliver() {
        while (this.taker !== null && this.steps.length) {
            const message = this.steps.shift();
            if (message.epoch !== this.epoch && message.epoch !== null)
                continue; // it was taken back
            const taker = this.taker;
            this.taker = null;
            if (message.error !== undefined) {
                [this.upto, this.window] = [this.progress.taken, 1];
                taker.reject(this.context.connection.error(message.error));
            }
            else {
                this.progress.taken = message.number;
                taker.resolve(message);
            }
        }
    }
    read(message) {
        const { tokens, text, probes = [], finish = null, retracted = 0, drafted = 0, accepted = 0 } = message;
        if (finish !== null)
            [this.finish, this.stopString] = [finish, message.stop_string ?? null];
        return { tokens, text, probes: probes.map((row) => this.probed(row)), finish, retracted, drafted, accepted };
    }
    probed(value) {
        if (Array.isArray(this.probe))
            return this.probe.map((one, i) => one.read(value[i]));
        return this.probe?.read(value);
    }
    /** Run to the end; all tokens that stayed. */
    async tokens() {
        await this.started;
        return this.several ? (await this.sequences())[0].tokens : (await this.collect("tokens")).generated;
    }
    /** Run to the end; the whole text. */
    async text() {
        await this.started;
        return this.several ? (await this.sequences())[0].text : (await this.collect("text")).text;
    }
    /** Run to the end; the text as JSON. With a schema only such can come. */
    async json(schema) {
        await this.started;
        const grammar = schema === undefined ? null : schema instanceof Grammar ? schema : Grammar.jsonSchema(schema);
        const { text, finish } = await this.collect("text", grammar?.json() ?? null);
        try {
            return JSON.parse(text);
        }
        catch {
            throw new HeadwayError(`the text is not valid JSON (finish ${finish}): ${text.slice(0, 80)}`, "InvalidInput");
        }
    }
    /** Run to the end; every sequence of several, the best first. */
    async sequences() {
        await this.started;
        if (this.results === null) {
            const state = await this.ask("sequences");
            this.note(state);
            this.results = state.sequences.map((one) => ({ ...one, score: numberOf(one.score), probes: one.probes.map((row) => this.probed(row)) }));
        }
        return this.results;
    }
    /** Run to the end; a context for every sequence, of which the first is this one's. */
    async contexts() {
        const contexts = (await this.sequences()).slice(1).map(() => this.context.engine.newNumber());
        const count = await this.ask("contexts", { contexts });
        return [this.context, ...contexts.slice(0, count).map((number) => new Context(this.context.engine, number))];
    }
    async collect(what, schema = null) {
        this.context.settle(this);
        this.restart();
        const reply = await this.context.connection.request("generation.collect", { generation: this.number, what, taken: this.progress.taken, epoch: this.epoch, schema });
        this.note(reply);
        return reply;
    }
    // -- by hand ----------------------------------------------------------------------------------------------------------
    /** The tokens so far: sampled, forced or accepted, and not cut since. */
    async generated() {
        return (await this.ask("state")).generated;
    }
    /** Rounds, drafts and accepted drafts so far; null where it does not speculate. */
    async speculation() {
        const { speculation } = await this.ask("state");
        return speculation === null ? null : camelKeys(speculation);
    }
    /** Add tokens by hand, as if they had been sampled. */
    async accept(tokens) {
        const reply = await this.ask("accept", { tokens: [...tokens], followed: false });
        this.note(reply);
        return this.read(reply.step);
    }
    /** Tokens that the constraint forces. */
    forced() {
        return this.ask("forced");
    }
    /** Sample the tokens that follow with another seed, or with fresh entropy. */
    async reseed(seed = null) {
        this.seed = await this.ask("reseed", { seed });
    }
    /** Go on after an end, with the context as it is now. */
    async resume(maxTokens = null) {
        await this.ask("resume", { max_tokens: maxTokens });
        this.finish = this.stopString = null;
    }
    /** A second generation that goes on from here, on a fork of the context. */
    async fork({ seed = null } = {}) {
        const [fork, context] = [this.context.engine.newNumber(), this.context.engine.newNumber()];
        const reply = await this.ask("fork", { fork, context, seed });
        const started = Promise.resolve({ seed: reply.seed, several: this.several });
        const objects = reply.object === null ? [] : [reply.object];
        const twin = new Generation(new Context(this.context.engine, context), fork, this.probe, this.patient, started, objects);
        [twin.finish, twin.stopString] = [reply.finish, this.stopString];
        return twin;
    }
    // -- messages ---------------------------------------------------------------------------------------------------------
    async ask(verb, args = {}) {
        await this.started;
        this.context.checkOpen();
        this.context.settle();
        return this.context.connection.request(`generation.${verb}`, { generation: this.number, ...args });
    }
    /** @internal Have the server take back what the program has not taken. */
    settle() {
        if (this.taker !== null || this.upto <= this.progress.taken || this.failure !== null)
            return;
        this.restart();
        this.context.connection.tell("generation.settle", { generation: this.number, taken: this.progress.taken, epoch: this.epoch });
    }
    restart() {
        this.epoch++;
        [this.upto, this.window] = [this.progress.taken, 1];
        this.steps.length = 0;
    }
    note(state) {
        [this.finish, this.stopString, this.seed] = [state.finish, state.stop_string, state.seed];
    }
}
/** Generations that the program has let go of: what it has not taken is undone. */
const dropped = new FinalizationRegistry(({ engine, number, objects, progress }) => {
    engine.generations.delete(number);
    engine.callables.drop(objects);
    engine.connection.tell("generation.drop", { generation: number, taken: progress.taken });
});
