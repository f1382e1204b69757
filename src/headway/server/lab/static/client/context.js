// A context: one sequence whose pages are on the server. Verbs are sent in the order in which they are called, so that
// a program need not await one before it calls the next; awaiting it tells whether it failed.
import { Chat } from "./chat.js";
import { HeadwayError } from "./errors.js";
import { Forward } from "./forward.js";
import { Mask } from "./masks.js";
import { startGeneration } from "./options.js";
import { Pages } from "./pages.js";
export class Context {
    engine;
    number;
    released = false;
    /** @internal */ generations = new Set();
    /** @internal */
    constructor(engine, 
    /** @internal */ number) {
        this.engine = engine;
        this.number = number;
        lost.register(this, { connection: engine.connection, number }, this);
    }
    /** @internal */
    get connection() {
        return this.engine.connection;
    }
    // -- writing ----------------------------------------------------------------------------------------------------------
    /** Append text or token ids to the pending buffer; nothing is computed yet. */
    fill(text, { special = false } = {}) {
        return this.ask("fill", { text: typeof text === "string" ? text : [...text], special });
    }
    /** Append a system message through the model's chat template. */
    system(text) {
        return this.ask("say", { role: "system", text });
    }
    /** Append a user message. */
    user(text) {
        return this.ask("say", { role: "user", text });
    }
    /** Append an assistant message, closed. */
    assistant(text) {
        return this.ask("say", { role: "assistant", text });
    }
    /** Append the generation prompt. */
    cue() {
        return this.ask("cue");
    }
    /** Append what the template puts after an assistant text. */
    seal() {
        return this.ask("seal");
    }
    /** The priority of this context's passes, from -1000 to 1000. */
    setBid(bid) {
        return this.ask("bid", { bid });
    }
    // -- reading ----------------------------------------------------------------------------------------------------------
    /** Lengths, pending tokens, the next position, the seed. */
    async state() {
        const { seq_len, pending, next_position, cached_tokens, seed, text_start } = await this.ask("state");
        return { seqLen: seq_len, pending, nextPosition: next_position, cachedTokens: cached_tokens, seed, textStart: text_start };
    }
    /** Every token of the sequence, pending ones last. */
    tokens() {
        return this.ask("tokens");
    }
    /** The chat so far. */
    messages() {
        return this.ask("messages");
    }
    /** @internal */
    positions() {
        return this.ask("positions");
    }
    // -- computing --------------------------------------------------------------------------------------------------------
    /** A new pass over this context. */
    forward() {
        this.checkOpen();
        return new Forward(this);
    }
    /** Compute the pending tokens. */
    async flush({ attentionMask, adapter } = {}) {
        const mask = attentionMask === undefined || attentionMask instanceof Mask ? attentionMask : Mask.fromRuns(attentionMask);
        const args = { number: this.engine.newNumber(), attention_mask: mask === undefined ? null : await this.maskJson(mask, 0) };
        await this.ask("flush", { ...args, adapter: adapterList(adapter) });
    }
    /** Many passes: an async iterator of steps; `await generation.text()` collects. */
    generate(sampler, options = {}) {
        this.checkOpen();
        return startGeneration(this, sampler ?? null, options);
    }
    /** Append messages and get the reply, with tools that run here: an async iterator of parts. */
    chat(messages, options = {}) {
        this.checkOpen();
        return new Chat(this, messages, options);
    }
    /** @internal */
    async maskJson(mask, more) {
        if (!mask.needsPositions)
            return mask.json();
        const { positions, pending, next } = await this.positions();
        const first = positions.length;
        for (let at = next - pending; at < next + more; at++)
            positions.push(at);
        return mask.json({ positions, first, rows: positions.length - first });
    }
    // -- changing ---------------------------------------------------------------------------------------------------------
    /** A second context that shares every committed page and has copies of the rest. */
    async fork() {
        const fork = this.engine.newNumber();
        await this.ask("fork", { fork });
        return new Context(this.engine, fork);
    }
    /** Drop the last n tokens, pending ones first. */
    truncate(n) {
        return this.ask("truncate", { n });
    }
    /** Keep this context on the server under a name; `engine.open(name)` gives forks. */
    save(name, { durable = false } = {}) {
        return this.ask("save", { name, durable });
    }
    /** The raw page operations. */
    inner() {
        this.checkOpen();
        return new Pages(this);
    }
    /** Release the pages; the context cannot be used after. */
    release() {
        if (this.released)
            return;
        this.released = true;
        lost.unregister(this);
        this.connection.tell("context.release", { context: this.number });
    }
    // -- messages ---------------------------------------------------------------------------------------------------------
    /** @internal A verb of this context, and its reply. */
    async ask(verb, args = {}, group = "context") {
        this.checkOpen();
        this.settle();
        return this.connection.request(`${group}.${verb}`, { context: this.number, ...args });
    }
    /** @internal Take back what generations run ahead, so that the context is seen as it is between two steps. */
    settle(but = null) {
        for (const each of this.generations) {
            const generation = each.deref();
            if (generation === undefined)
                this.generations.delete(each);
            else if (generation !== but)
                generation.settle();
        }
    }
    /** @internal */
    checkOpen() {
        this.engine.checkOpen();
        if (this.released)
            throw new HeadwayError("this context was released; create a new one with engine.context()", "Closed");
    }
}
/** Contexts that the program has lost are released. */
const lost = new FinalizationRegistry(({ connection, number }) => {
    connection.tell("context.release", { context: number });
});
/** @internal */
export function adapterList(given) {
    if (given === undefined)
        return null;
    if (typeof given === "string")
        return [[given, 1]];
    if (given.length === 2 && typeof given[1] === "number")
        return [given];
    return given.map((one) => (typeof one === "string" ? [one, 1] : one));
}
