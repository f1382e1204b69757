// A chat reply: the server writes the messages, and the program's tools run here.

import { adapterList, type Adapter, type Context } from "./context.js";
import type { Sampler } from "./samplers.js";

/** A tool: its schema, and what runs it; without `run` its calls are handed back. */
export interface Tool {
  name: string;
  description?: string;
  /** A JSON schema of its arguments. */
  parameters: object;
  run?: (args: any) => unknown;
}

export interface ToolCall {
  name: string;
  arguments: Record<string, unknown>;
  id: string | null;
}

export type Part =
  | { kind: "Content" | "Reasoning"; text: string }
  | { kind: "ToolCallStart"; index: number; name: string }
  | { kind: "ToolCallArguments"; index: number; delta: string }
  | { kind: "ToolCallEnd"; index: number; arguments: Record<string, unknown>; id: string | null }
  | { kind: "BadToolCall"; text: string; why: string; index: number | null }
  | { kind: "ToolResult"; call: ToolCall; text: string; failed: number | null };

export interface ChatOptions {
  sampler?: Sampler;
  tools?: Tool[];
  toolChoice?: "auto" | "required" | "none" | { name: string };
  toolFormat?: string;
  onError?: "tell" | "raise";
  stop?: string | (string | number)[];
  maxTokens?: number;
  maxRounds?: number;
  adapter?: Adapter;
}

/** A reply as it arrives: an async iterator of parts. `await reply.text()` runs it to its end. */
export class Chat implements AsyncIterable<Part> {
  finish: string | null = null;
  rounds = 0;
  /** Calls that were made, with their results, or that were handed back. */
  calls: (ToolCall | { call: ToolCall; text: string; failed: number | null })[] = [];
  private readonly number: number;
  private readonly started: Promise<void>;
  private readonly tools: Map<string, Tool>;

  /** @internal */
  constructor(
    private readonly context: Context,
    messages: string | object | object[] | null,
    { sampler, tools, toolChoice = "auto", toolFormat, onError = "tell", stop = [], maxTokens = 512, maxRounds = 8, adapter }: ChatOptions,
  ) {
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

  async *[Symbol.asyncIterator](): AsyncGenerator<Part, void, void> {
    await this.started;
    while (this.finish === null) yield* this.note(await this.ask("next"));
  }

  /** Run to the end; the content of the last message. */
  async text(): Promise<string> {
    await this.started;
    if (this.finish === null) this.note(await this.ask("text"));
    return (await this.ask("state")).content;
  }

  /** The reasoning so far, of all rounds. */
  async reasoning(): Promise<string> {
    await this.started;
    return (await this.ask("state")).reasoning;
  }

  /** Let go of it; its context stays. */
  close(): void {
    this.context.engine.chats.delete(this.number);
    this.context.connection.tell("chat.drop", { chat: this.number });
  }

  private ask(verb: string): Promise<any> {
    return this.context.connection.request(`chat.${verb}`, { chat: this.number });
  }

  private note({ parts, finish, rounds, calls }: any): Part[] {
    [this.finish, this.rounds, this.calls] = [finish, rounds, calls];
    return parts;
  }

  /** @internal Make a call for the server: the text for the model, whether it failed, whether the call was wrong. */
  async run([, name, args]: [number, string, object]): Promise<[string, boolean, boolean]> {
    const tool = this.tools.get(name);
    if (tool?.run === undefined) return [`error: there is no tool '${name}'; there are ${[...this.tools.keys()].join(", ")}`, true, true];
    try {
      const value = await tool.run(args);
      return [typeof value === "string" ? value : JSON.stringify(value ?? null), false, false];
    } catch (error) {
      return [`error: ${(error as Error).name}: ${(error as Error).message}`, true, false];
    }
  }
}
