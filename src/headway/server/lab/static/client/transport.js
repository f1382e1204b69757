// Connections: the WebSocket of the browser (or of Node 22), or what Node has. Frames in, frames out.
import { ConnectionFailed } from "./errors.js";
/** Connect to a server's sessions: `http(s)://HOST:PORT`, or in Node `unix:/FILE`. */
export const openTransport = async (url, listener, timeout) => {
    if (url.startsWith("unix:"))
        return (await import("./node.js")).openSocket(url.replace(/^unix:(\/\/)?/, ""), listener, timeout);
    const address = websocketUrl(url);
    return typeof WebSocket === "undefined"
        ? (await import("./node.js")).openWebSocket(address, listener, timeout)
        : openWebSocket(address, listener, timeout);
};
/** The address of a server's sessions. */
export function websocketUrl(url) {
    let parts;
    try {
        parts = new URL(url);
    }
    catch {
        throw new ConnectionFailed(`the server's address is ${url}; it must be http://HOST:PORT, https://HOST or unix:/FILE`, "address");
    }
    const scheme = { "http:": "ws:", "https:": "wss:", "ws:": "ws:", "wss:": "wss:" }[parts.protocol];
    if (scheme === undefined || parts.search || parts.username) {
        throw new ConnectionFailed(`the server's address is ${url}; a key is given as apiKey`, "address");
    }
    const path = parts.pathname.replace(/\/$/, "").replace(/\/v1$/, "");
    return `${scheme}//${parts.host}${path}/v1/session`;
}
const openWebSocket = (url, listener, timeout) => new Promise((resolve, reject) => {
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    let isOpen = false;
    const timer = setTimeout(() => socket.close(), timeout);
    socket.onopen = () => {
        isOpen = true;
        clearTimeout(timer);
        resolve({ send: (frame) => socket.send(frame), close: () => socket.close(1000) });
    };
    socket.onmessage = ({ data }) => listener.frame(new Uint8Array(data));
    socket.onclose = ({ reason }) => {
        clearTimeout(timer);
        if (isOpen)
            listener.gone(reason || "the connection was lost");
        else
            reject(new Error(`cannot connect to ${url}`));
    };
});
