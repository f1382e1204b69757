// A chat reply: the server writes the messages, and the program's tools run here.
import { adapterList } from "./context.js";
/** A reply as it arrives: an async iterator of parts. `await reply.text()` runs it to its end. */
export class Chat {
    context;
    finish = null;
    rounds = 0;
    /** Calls that were made, with their results, or that were handed back. */
    calls = [];
    number;
    started;
    tools;
    /** @internal */
    constructor(context, messages, { sampler, tools, toolChoice = "auto", toolFormat, onError = "tell", stop = [], maxTokens = 512, maxRounds = 8, adapter }) {
        this.context = context;
        this.tools = new Map((tools ?? []).map((tool) => [tool.name, tool]));
        this.number = context.engine.newNumber();
        context.engine.chats.set(this.number, this);
        const schemas = tools?.map(({ name, description = "", parameters, run }) => [
            { type: "function", function: { name, description, parameters } },
            run !== undefined,
        ]);
        this.started = context
            .ask("new", {
            chat: this.number, messages, sampler: sampler ?? null, tools: schemas ?? null, tool_choice: toolChoice, tool_format: toolFormat ?? null,
            on_error: onError, stop: typeof stop === "string" ? [stop] : stop, max_tokens: maxTokens, max_rounds: maxRounds, adapter: adapterList(adapter),
        }, "chat")
            .then((state) => void this.note(state));
        this.started.catch(() => this.close());
    }
    async *[Symbol.asyncIterator]() {
        await this.started;
        while (this.finish === null)
            yield* this.note(await this.ask("next"));
    }
    /** Run to the end; the content of the last message. */
    async text() {
        await this.started;
        if (this.finish === null)
            this.note(await this.ask("text"));
        return (await this.ask("state")).content;
    }
    /** The reasoning so far, of all rounds. */
    async reasoning() {
        await this.started;
        return (await this.ask("state")).reasoning;
    }
    /** Let go of it; its context stays. */
    close() {
        this.context.engine.chats.delete(this.number);
        this.context.connection.tell("chat.drop", { chat: this.number });
    }
    ask(verb) {
        return this.context.connection.request(`chat.${verb}`, { chat: this.number });
    }
    note({ parts, finish, rounds, calls }) {
        [this.finish, this.rounds, this.calls] = [finish, rounds, calls];
        return parts;
    }
    /** @internal Make a call for the server: the text for the model, whether it failed, whether the call was wrong. */
    async run([, name, args]) {
        const tool = this.tools.get(name);
        if (tool?.run === undefined)
            return [`error: there is no tool '${name}'; there are ${[...this.tools.keys()].join(", ")}`, true, true];
        try {
            const value = await tool.run(args);
            return [typeof value === "string" ? value : JSON.stringify(value ?? null), false, false];
        }
        catch (error) {
            return [`error: ${error.name}: ${error.message}`, true, false];
        }
    }
}
