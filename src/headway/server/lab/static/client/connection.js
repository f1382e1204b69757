// One session with a server, over as many connections as it takes. Messages are numbered, and those that the server has
// not acknowledged are kept: after a drop they are sent again, so that each is handled once.
import { decode, encode, VERSION } from "./codec.js";
import { ConnectionFailed, HeadwayError } from "./errors.js";
import { openTransport } from "./transport.js";
const ACK_EVERY = 32;
const PAUSES = [50, 100, 200, 500, 1000]; // milliseconds between attempts to come back; the last one is repeated
export class Connection {
    url;
    first;
    timeout;
    route;
    onLost;
    open;
    welcome;
    lost = null;
    transport = null;
    unacked = [];
    sent = 0;
    received = 0;
    told = 0;
    ids = 0;
    closing = false;
    waiting = new Map();
    raised = new Map(); // what the program's functions threw, by call
    constructor(url, first, timeout, route, onLost, open) {
        this.url = url;
        this.first = first;
        this.timeout = timeout;
        this.route = route;
        this.onLost = onLost;
        this.open = open;
    }
    static async to(url, first, timeout, route, onLost, open = openTransport) {
        const connection = new Connection(url, first, timeout, route, onLost, open);
        try {
            await connection.start();
        }
        catch (error) {
            throw error instanceof HeadwayError ? error : new ConnectionFailed(error.message, "refused");
        }
        return connection;
    }
    // -- for programs -----------------------------------------------------------------------------------------------------
    /** Ask, and get the reply. */
    request(verb, args = {}) {
        return this.ask(verb, args).reply;
    }
    /** The same, with the number of the request. */
    ask(verb, args) {
        const id = ++this.ids;
        const reply = new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
        try {
            this.post({ type: "request", id, verb, args });
        }
        catch (error) {
            this.waiting.get(id).reject(error);
            this.waiting.delete(id);
        }
        return { id, reply };
    }
    /** Ask for something that cannot fail, or whose failure the next request shows. */
    tell(verb, args) {
        if (this.lost === null && !this.closing)
            this.post({ type: "request", id: ++this.ids, verb, args, quiet: true });
    }
    /** Return from a call of the server. */
    give(call, value) {
        this.post({ type: "return", id: call, value });
    }
    fail(call, error) {
        this.raised.set(call, error);
        const message = String(error?.message ?? error).slice(0, 1000);
        this.post({ type: "return", id: call, error: { kind: error?.name ?? "Error", message } });
    }
    /** The error of a reply; one that a function of the program threw is itself. */
    error(given) {
        if (given.call !== undefined && this.raised.has(given.call)) {
            const own = this.raised.get(given.call);
            this.raised.delete(given.call);
            return own;
        }
        return new HeadwayError(given.message, given.kind);
    }
    close() {
        if (this.lost === null && !this.closing) {
            this.post({ type: "bye" });
            this.closing = true;
        }
    }
    /** Throw unless messages can be sent. */
    checkOpen() {
        if (this.lost !== null)
            throw this.lost;
        if (this.closing)
            throw new HeadwayError("this engine is closed; connect again", "Closed");
    }
    post(message) {
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
    async start() {
        let welcomed;
        let refused;
        const first = new Promise((resolve, reject) => ([welcomed, refused] = [resolve, reject]));
        first.catch(() => { });
        let isWelcome = false;
        const transport = await this.open(this.url, {
            frame: (frame) => {
                if (isWelcome)
                    return this.arrived(decode(frame));
                isWelcome = true;
                welcomed(decode(frame));
            },
            gone: (why) => (isWelcome && this.transport === transport ? this.dropped() : refused(new Error(why))),
        }, this.timeout);
        const resume = this.welcome === undefined ? undefined : { session: this.welcome.session, received: this.received };
        transport.send(encode({ type: "hello", version: VERSION, ...this.first, resume }));
        const timer = setTimeout(() => refused(new Error("the server said nothing")), this.timeout);
        const message = await first.finally(() => clearTimeout(timer));
        if (message.type !== "welcome" || message.version !== VERSION) {
            transport.close();
            throw new ConnectionFailed(`the server closed the connection (${message.reason}): ${message.message}`, message.reason);
        }
        this.welcome = message;
        this.transport = transport;
        for (const [number, frame] of this.unacked)
            if (number > this.welcome.received)
                transport.send(frame);
    }
    dropped() {
        this.transport = null;
        if (this.closing)
            return this.end(new HeadwayError("this engine's connection was closed", "Closed"));
        if (this.lost === null)
            void this.comeBack();
    }
    async comeBack() {
        const until = Date.now() + 1000 * this.welcome.grace;
        for (let attempt = 0;; attempt++) {
            try {
                return await this.start();
            }
            catch (error) {
                if (error instanceof HeadwayError)
                    return this.end(error);
                if (Date.now() > until)
                    return this.end(new ConnectionFailed(error.message));
            }
            await new Promise((resolve) => setTimeout(resolve, PAUSES[Math.min(attempt, PAUSES.length - 1)]));
        }
    }
    end(error) {
        if (this.lost !== null)
            return;
        this.lost = error;
        const waiting = [...this.waiting.values()];
        this.waiting.clear();
        for (const { reject } of waiting)
            reject(error);
        this.onLost(error);
    }
    arrived(message) {
        if (message.ack !== undefined)
            while (this.unacked.length && this.unacked[0][0] <= message.ack)
                this.unacked.shift();
        if (message.type === "ack")
            return;
        if (message.type === "close") {
            const error = new ConnectionFailed(`the server closed the session (${message.reason}): ${message.message}`, message.reason);
            return this.end(this.closing ? new HeadwayError("this engine's connection was closed", "Closed") : error);
        }
        if (message.n !== this.received + 1)
            return this.end(new ConnectionFailed(`message ${this.received + 1} is next, and ${message.n} came`, "out_of_order"));
        this.received = message.n;
        if (message.type === "reply")
            this.replied(message);
        else
            this.route(message);
        if (this.received - this.told >= ACK_EVERY) {
            this.told = this.received;
            this.transport?.send(encode({ type: "ack", ack: this.received }));
        }
    }
    replied(message) {
        const waiter = this.waiting.get(message.id);
        this.waiting.delete(message.id);
        if (message.error !== undefined)
            waiter?.reject(this.error(message.error));
        else
            waiter?.resolve(message.value);
    }
}
