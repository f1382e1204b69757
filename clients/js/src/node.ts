// What Node has: a Unix socket, and a WebSocket for versions without one of their own. Loaded only where it is needed.

import { createHash, randomBytes } from "node:crypto";
import { request as httpRequest } from "node:http";
import { request as httpsRequest } from "node:https";
import { connect, type Socket } from "node:net";

import { ConnectionFailed } from "./errors.js";
import type { OpenTransport } from "./transport.js";

const LENGTH = 8; // bytes of a frame's length on a Unix socket
const MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"; // of RFC 6455

/** A Unix socket: each frame after its length. */
export const openSocket: OpenTransport = (path, listener, timeout) =>
  new Promise((resolve, reject) => {
    const socket = connect(path);
    let waiting = Buffer.alloc(0);
    let isOpen = false;
    socket.setTimeout(timeout, () => isOpen || socket.destroy(new Error("it took too long")));
    socket.once("connect", () => {
      isOpen = true;
      socket.setTimeout(0);
      resolve({
        send(frame) {
          const length = Buffer.alloc(LENGTH);
          length.writeBigUInt64LE(BigInt(frame.length));
          socket.write(length);
          socket.write(frame);
        },
        close: () => socket.end(),
      });
    });
    socket.on("data", (data) => {
      waiting = waiting.length ? Buffer.concat([waiting, data]) : data;
      while (waiting.length >= LENGTH) {
        const end = LENGTH + Number(waiting.readBigUInt64LE());
        if (waiting.length < end) return;
        const frame = waiting.subarray(LENGTH, end);
        waiting = waiting.subarray(end);
        listener.frame(frame);
      }
    });
    socket.on("error", (error) => isOpen || reject(new Error(`cannot connect to the socket ${path}: ${error.message}`)));
    socket.on("close", () => isOpen && listener.gone("the connection was lost"));
  });

/** A WebSocket client: binary messages, no extensions. */
export const openWebSocket: OpenTransport = (url, listener, timeout) =>
  new Promise((resolve, reject) => {
    const key = randomBytes(16).toString("base64");
    const address = new URL(url.replace(/^ws/, "http"));
    const ask = address.protocol === "https:" ? httpsRequest : httpRequest;
    const headers = { Connection: "Upgrade", Upgrade: "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key };
    const request = ask(address, { headers, timeout });
    request.on("timeout", () => request.destroy(new Error("it took too long")));
    request.on("error", (error) => reject(new Error(`cannot connect to ${url}: ${error.message}`)));
    request.on("response", (response) => {
      response.resume();
      reject(new ConnectionFailed(`${url} refused the connection with status ${response.statusCode}`, "refused"));
    });
    request.on("upgrade", (response, socket: Socket, head) => {
      const expected = createHash("sha1").update(key + MAGIC).digest("base64");
      if (response.headers["sec-websocket-accept"] !== expected) {
        socket.destroy();
        return reject(new ConnectionFailed(`${url} is not a WebSocket`, "refused"));
      }
      socket.setTimeout(0);
      socket.setNoDelay(true);
      const frames = new Frames(socket, listener.frame.bind(listener));
      socket.on("data", (data) => frames.read(data));
      socket.on("error", () => socket.destroy());
      socket.on("close", () => listener.gone(frames.reason || "the connection was lost"));
      resolve({ send: (frame) => frames.write(2, frame), close: () => frames.close() });
      if (head.length) frames.read(head);
    });
    request.end();
  });

/** The frames of RFC 6455 on a socket. */
class Frames {
  private waiting: Buffer = Buffer.alloc(0);
  private parts: Buffer[] = [];
  reason = "";

  constructor(
    private readonly socket: Socket,
    private readonly deliver: (message: Uint8Array) => void,
  ) {}

  read(data: Buffer): void {
    this.waiting = this.waiting.length ? Buffer.concat([this.waiting, data]) : data;
    for (;;) {
      const size = this.size();
      if (size === null || this.waiting.length < size.head + size.body) return;
      const first = this.waiting[0]!;
      const body = this.waiting.subarray(size.head, size.head + size.body);
      this.waiting = this.waiting.subarray(size.head + size.body);
      this.handle(first & 15, (first & 128) !== 0, body);
    }
  }

  private size(): { head: number; body: number } | null {
    if (this.waiting.length < 2) return null;
    const short = this.waiting[1]! & 127;
    if (short < 126) return { head: 2, body: short };
    if (short === 126) return this.waiting.length < 4 ? null : { head: 4, body: this.waiting.readUInt16BE(2) };
    return this.waiting.length < 10 ? null : { head: 10, body: Number(this.waiting.readBigUInt64BE(2)) };
  }

  private handle(kind: number, isLast: boolean, body: Buffer): void {
    if (kind === 9) return this.write(10, body); // ping
    if (kind === 8) {
      this.reason = body.subarray(2).toString();
      return this.close();
    }
    if (kind > 2) return;
    this.parts.push(Buffer.from(body));
    if (isLast) {
      const message = Buffer.concat(this.parts);
      this.parts = [];
      this.deliver(message);
    }
  }

  write(kind: number, body: Uint8Array): void {
    const long = body.length < 126 ? 0 : body.length < 1 << 16 ? 2 : 8;
    const head = Buffer.alloc(2 + long + 4);
    head[0] = 128 | kind;
    head[1] = 128 | (long === 0 ? body.length : long === 2 ? 126 : 127);
    if (long === 2) head.writeUInt16BE(body.length, 2);
    if (long === 8) head.writeBigUInt64BE(BigInt(body.length), 2);
    const mask = randomBytes(4);
    mask.copy(head, 2 + long);
    const masked = Buffer.from(body);
    for (let i = 0; i < masked.length; i++) masked[i]! ^= mask[i & 3]!;
    if (!this.socket.destroyed) this.socket.write(Buffer.concat([head, masked]));
  }

  close(): void {
    this.write(8, Buffer.from([3, 232])); // 1000
    this.socket.end();
  }
}
