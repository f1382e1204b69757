// One session with a server, over as many connections as it takes. Messages are numbered, and those that the server has
// not acknowledged are kept: after a drop they are sent again, so that each is handled once.

import { decode, encode, VERSION, type Message } from "./codec.js";
import { ConnectionFailed, HeadwayError } from "./errors.js";
import { openTransport, type OpenTransport, type Transport } from "./transport.js";

const ACK_EVERY = 32;
const PAUSES = [50, 100, 200, 500, 1000]; // milliseconds between attempts to come back; the last one is repeated

/** What a session's first message says of its program: its key, and the model that it wants. */
export interface Hello {
  key?: string;
  model?: string;
}

export interface Welcome {
  session: string;
  received: number;
  grace: number;
  max_message_bytes: number;
  engine: any;
}

type Waiter = { resolve: (value: any) => void; reject: (error: unknown) => void };

export class Connection {
  welcome!: Welcome;
  lost: HeadwayError | null = null;
  private transport: Transport | null = null;
  private unacked: [number, Uint8Array][] = [];
  private sent = 0;
  private received = 0;
  private told = 0;
  private ids = 0;
  private closing = false;
  private readonly waiting = new Map<number, Waiter>();
  private readonly raised = new Map<number, unknown>(); // what the program's functions threw, by call

  private constructor(
    private readonly url: string,
    private readonly first: Hello,
    private readonly timeout: number,
    private readonly route: (message: Message) => void,
    private readonly onLost: (error: HeadwayError) => void,
    private readonly open: OpenTransport,
  ) {}

  static async to(
    url: string,
    first: Hello,
    timeout: number,
    route: (message: Message) => void,
    onLost: (error: HeadwayError) => void,
    open: OpenTransport = openTransport,
  ): Promise<Connection> {
    const connection = new Connection(url, first, timeout, route, onLost, open);
    try {
      await connection.start();
    } catch (error) {
      throw error instanceof HeadwayError ? error : new ConnectionFailed((error as Error).message, "refused");
    }
    return connection;
  }

  // -- for programs -----------------------------------------------------------------------------------------------------

  /** Ask, and get the reply. */
  request(verb: string, args: object = {}): Promise<any> {
    return this.ask(verb, args).reply;
  }

  /** The same, with the number of the request. */
  ask(verb: string, args: object): { id: number; reply: Promise<any> } {
    const id = ++this.ids;
    const reply = new Promise<any>((resolve, reject) => this.waiting.set(id, { resolve, reject }));
    try {
      this.post({ type: "request", id, verb, args });
    } catch (error) {
      this.waiting.get(id)!.reject(error);
      this.waiting.delete(id);
    }
    return { id, reply };
  }

  /** Ask for something that cannot fail, or whose failure the next request shows. */
  tell(verb: string, args: object): void {
    if (this.lost === null && !this.closing) this.post({ type: "request", id: ++this.ids, verb, args, quiet: true });
  }

  /** Return from a call of the server. */
  give(call: number, value: unknown): void {
    this.post({ type: "return", id: call, value });
  }

  fail(call: number, error: unknown): void {
    this.raised.set(call, error);
    const message = String((error as Error)?.message ?? error).slice(0, 1000);
    this.post({ type: "return", id: call, error: { kind: (error as Error)?.name ?? "Error", message } });
  }

  /** The error of a reply; one that a function of the program threw is itself. */
  error(given: any): unknown {
    if (given.call !== undefined && this.raised.has(given.call)) {
      const own = this.raised.get(given.call);
      this.raised.delete(given.call);
      return own;
    }
    return new HeadwayError(given.message, given.kind);
  }

  close(): void {
    if (this.lost === null && !this.closing) {
      this.post({ type: "bye" });
      this.closing = true;
    }
  }

  /** Throw unless messages can be sent. */
  checkOpen(): void {
    if (this.lost !== null) throw this.lost;
    if (this.closing) throw new HeadwayError("this engine is closed; connect again", "Closed");
  }

  private post(message: object): void {
    this.checkOpen();
    const frame = encode({ n: this.sent + 1, ack: this.received, ...message });
    if (frame.length > this.welcome.max_message_bytes) {
      throw new HeadwayError(`this message has ${frame.length} bytes and the server takes at most ${this.welcome.max_message_bytes}; send less`, "InvalidInput");
    }
    this.sent++;
    this.told = this.received;
    this.unacked.push([this.sent, frame]);
    this.transport?.send(frame);
  }

  // -- coming and going -------------------------------------------------------------------------------------------------

  private async start(): Promise<void> {
    let welcomed: (message: Message) => void;
    let refused: (error: unknown) => void;
    const first = new Promise<Message>((resolve, reject) => ([welcomed, refused] = [resolve, reject]));
    first.catch(() => {});
    let isWelcome = false;
    const transport = await this.open(
      this.url,
      {
        frame: (frame) => {
          if (isWelcome) return this.arrived(decode(frame));
          isWelcome = true;
          welcomed(decode(frame));
        },
        gone: (why) => (isWelcome && this.transport === transport ? this.dropped() : refused(new Error(why))),
      },
      this.timeout,
    );
    const resume = this.welcome === undefined ? undefined : { session: this.welcome.session, received: this.received };
    transport.send(encode({ type: "hello", version: VERSION, ...this.first, resume }));
    const timer = setTimeout(() => refused(new Error("the server said nothing")), this.timeout);
    const message = await first.finally(() => clearTimeout(timer));
    if (message.type !== "welcome" || message.version !== VERSION) {
      transport.close();
      throw new ConnectionFailed(`the server closed the connection (${message.reason}): ${message.message}`, message.reason);
    }
    this.welcome = message as unknown as Welcome;
    this.transport = transport;
    for (const [number, frame] of this.unacked) if (number > this.welcome.received) transport.send(frame);
  }

  private dropped(): void {
    this.transport = null;
    if (this.closing) return this.end(new HeadwayError("this engine's connection was closed", "Closed"));
    if (this.lost === null) void this.comeBack();
  }

  private async comeBack(): Promise<void> {
    const until = Date.now() + 1000 * this.welcome.grace;
    for (let attempt = 0; ; attempt++) {
      try {
        return await this.start();
      } catch (error) {
        if (error instanceof HeadwayError) return this.end(error);
        if (Date.now() > until) return this.end(new ConnectionFailed((error as Error).message));
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSES[Math.min(attempt, PAUSES.length - 1)]));
    }
  }

  private end(error: HeadwayError): void {
    if (this.lost !== null) return;
    this.lost = error;
    const waiting = [...this.waiting.values()];
    this.waiting.clear();
    for (const { reject } of waiting) reject(error);
    this.onLost(error);
  }

  private arrived(message: Message): void {
    if (message.ack !== undefined) while (this.unacked.length && this.unacked[0]![0] <= message.ack) this.unacked.shift();
    if (message.type === "ack") return;
    if (message.type === "close") {
      const error = new ConnectionFailed(`the server closed the session (${message.reason}): ${message.message}`, message.reason);
      return this.end(this.closing ? new HeadwayError("this engine's connection was closed", "Closed") : error);
    }
    if (message.n !== this.received + 1) return this.end(new ConnectionFailed(`message ${this.received + 1} is next, and ${message.n} came`, "out_of_order"));
    this.received = message.n;
    if (message.type === "reply") this.replied(message);
    else this.route(message);
    if (this.received - this.told >= ACK_EVERY) {
      this.told = this.received;
      this.transport?.send(encode({ type: "ack", ack: this.received }));
    }
  }

  private replied(message: Message): void {
    const waiter = this.waiting.get(message.id);
    this.waiting.delete(message.id);
    if (message.error !== undefined) waiter?.reject(this.error(message.error));
    else waiter?.resolve(message.value);
  }
}
