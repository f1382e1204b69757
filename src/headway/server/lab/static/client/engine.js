// `connect`: an engine that is on a server, with the shapes of Headway's Python API.
import { Callables } from "./callables.js";
import { camelKeys } from "./codec.js";
import { Connection } from "./connection.js";
import { Context } from "./context.js";
import { HeadwayError } from "./errors.js";
/** An engine on a server: `http(s)://HOST:PORT`, or in Node `unix:/FILE`. */
export async function connect(url, { apiKey, model, timeout = 30_000 } = {}) {
    const engine = {};
    const first = { ...(apiKey === undefined ? {} : { key: apiKey }), ...(model === undefined ? {} : { model }) };
    const connection = await Connection.to(url, first, timeout, (message) => engine.made.route(message), (error) => engine.made?.lose(error));
    return (engine.made = new Engine(connection));
}
/** A model on a server. Made by `connect`; `close` it. */
export class Engine {
    connection;
    config;
    info;
    pageSize;
    pages;
    deterministic;
    eosIds;
    tokenizer;
    /** @internal */ callables = new Callables(() => this.newNumber());
    /** @internal */ generations = new Map();
    /** @internal */ active = new Set();
    /** @internal */ chats = new Map();
    numbers = 0;
    told = Promise.resolve(); // what the server asks is done in order
    /** @internal */
    constructor(/** @internal */ connection) {
        this.connection = connection;
        const about = connection.welcome.engine;
        this.config = camelKeys(about.config);
        this.info = camelKeys(about.info);
        this.pageSize = about.page_size;
        this.pages = about.pages;
        this.deterministic = about.deterministic;
        this.eosIds = about.eos_ids;
        this.tokenizer = about.tokenizer === null ? null : new Tokenizer(connection, about.tokenizer.vocab_size, about.tokenizer.bos_id);
    }
    /** V: the width of the logits. */
    get vocabSize() {
        return this.config.vocabSize;
    }
    /** An empty context. */
    context({ seed = null, priority = 0, salt = "", tokenBudget = null, deadline = null } = {}) {
        this.checkOpen();
        const context = this.newNumber();
        this.connection.tell("context.new", { context, seed, priority, salt, token_budget: tokenBudget, deadline });
        return new Context(this, context);
    }
    /** A fork of the context saved under a name, or null. */
    open(name) {
        return this.opened("engine.open", name);
    }
    /** The context saved under a name, which is then no longer saved; or null. */
    take(name) {
        return this.opened("engine.take", name);
    }
    /** Forget the context saved under a name; false when there was none. */
    delete(name) {
        return this.connection.request("engine.delete", { name });
    }
    async opened(verb, name) {
        const context = this.newNumber();
        return (await this.connection.request(verb, { name, context })) ? new Context(this, context) : null;
    }
    /** The LoRA adapters of the server by name, each with its scale. */
    adapters() {
        return this.connection.request("engine.adapters");
    }
    /** Pages now, and steps and tokens so far, of all programs of the engine. */
    async stats() {
        return camelKeys(await this.connection.request("engine.stats"));
    }
    /** Whether passes can be sent. */
    get alive() {
        return this.connection.lost === null;
    }
    /** End the session: the server releases its contexts. */
    close() {
        this.connection.close();
    }
    /** @internal */
    newNumber() {
        return ++this.numbers;
    }
    /** @internal */
    checkOpen() {
        this.connection.checkOpen();
    }
    /** @internal A step, or something that the server asks of the program. */
    route(message) {
        if (message.type === "step")
            return this.generations.get(message.generation)?.deref()?.arrived(message);
        if (message.method === "drop")
            return this.callables.drop([message.object]);
        if (message.method === "tool")
            return void this.answer(message, this.chats.get(message.generation)?.run(message.args) ?? Promise.reject(gone()));
        this.told = this.told.then(() => this.answer(message, this.callables.call(message, this.generations.get(message.generation)?.deref())));
    }
    async answer({ id }, result) {
        try {
            const value = await result;
            if (id !== undefined)
                this.connection.give(id, value ?? null);
        }
        catch (error) {
            if (id !== undefined && this.connection.lost === null)
                this.connection.fail(id, error);
        }
    }
    /** @internal */
    lose(error) {
        for (const generation of this.generations.values())
            generation.deref()?.lost(error);
    }
}
const gone = () => new HeadwayError("the program has let go of this chat", "Closed");
/** The model's tokenizer, on the server. */
export class Tokenizer {
    connection;
    vocabSize;
    bosId;
    names = null;
    /** @internal */
    constructor(connection, vocabSize, bosId) {
        this.connection = connection;
        this.vocabSize = vocabSize;
        this.bosId = bosId;
    }
    /** The name of every token, by id; null where an id has no token. */
    vocabulary() {
        return (this.names ??= this.connection.request("engine.vocabulary"));
    }
    /** The ids of a text; names of special tokens in it are plain text unless `special`. */
    encode(text, { special = false } = {}) {
        return this.connection.request("engine.encode", { text, special });
    }
    /** The text of ids. */
    decode(ids, { skipSpecial = false } = {}) {
        return this.connection.request("engine.decode", { ids: [...ids], skip_special: skipSpecial });
    }
    /** One token, for people to read. */
    async tokenText(id) {
        return (await this.connection.request("engine.token", { id }))[0];
    }
    /** The bytes that a token stands for. */
    async tokenBytes(id) {
        return Uint8Array.from((await this.connection.request("engine.token", { id }))[1]);
    }
}
