// Messages as bytes: a JSON object, and the arrays in it as raw bytes behind it. docs/protocol.md describes them.
export const VERSION = 1;
const HEADER = 4;
/** An array of several dimensions, row by row. */
export class Matrix {
    shape;
    data;
    constructor(shape, data) {
        this.shape = shape;
        this.data = data;
    }
    /** One row of a matrix of two dimensions. */
    row(index) {
        const width = this.shape[this.shape.length - 1] ?? 0;
        return this.data.subarray(index * width, (index + 1) * width);
    }
}
const READ = {
    "<f4": (buffer) => new Float32Array(buffer),
    "<f8": (buffer) => new Float64Array(buffer),
    "<i4": (buffer) => new Int32Array(buffer),
    "<i8": (buffer) => new BigInt64Array(buffer),
    "<u4": (buffer) => new Uint32Array(buffer),
    "|u1": (buffer) => new Uint8Array(buffer),
    "|b1": (buffer) => new Uint8Array(buffer),
};
function typeOf(array) {
    if (array instanceof Float32Array)
        return "<f4";
    if (array instanceof Float64Array)
        return "<f8";
    if (array instanceof Int32Array)
        return "<i4";
    if (array instanceof BigInt64Array)
        return "<i8";
    if (array instanceof Uint32Array)
        return "<u4";
    return "|u1";
}
function isArray(value) {
    return ArrayBuffer.isView(value) && !(value instanceof DataView);
}
/** A message as a frame. Integers beyond 2^53 are given as bigint. */
export function encode(message) {
    const blobs = [];
    let size = 0;
    const big = [];
    const mark = `\uF8FF${Math.random()}:`;
    const json = JSON.stringify(message, (_, value) => {
        if (typeof value === "bigint")
            return mark + (big.push(value.toString()) - 1);
        if (typeof value === "number" && !Number.isFinite(value))
            throw new TypeError(`${value} is not a finite number`);
        const array = value instanceof Matrix ? value.data : value;
        if (!isArray(array))
            return value;
        const shape = value instanceof Matrix ? value.shape : [array.length];
        blobs.push(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
        size += array.byteLength;
        return { array: [typeOf(array), shape, size - array.byteLength, array.byteLength] };
    });
    const text = big.reduce((all, digits, index) => all.replace(`"${mark}${index}"`, digits), json);
    const bytes = new TextEncoder().encode(text);
    const frame = new Uint8Array(HEADER + bytes.length + size);
    new DataView(frame.buffer).setUint32(0, bytes.length, true);
    frame.set(bytes, HEADER);
    let at = HEADER + bytes.length;
    for (const blob of blobs) {
        frame.set(blob, at);
        at += blob.length;
    }
    return frame;
}
/** The message of a frame. Seeds that a number cannot hold are bigints. */
export function decode(frame) {
    const length = new DataView(frame.buffer, frame.byteOffset, frame.byteLength).getUint32(0, true);
    const text = new TextDecoder().decode(frame.subarray(HEADER, HEADER + length));
    const blob = frame.subarray(HEADER + length);
    const kept = text.replace(/(?<!\\)"(seed|seeds)":(\d{16,}|\[[\d,]*\])/g, (_, name, value) => value.startsWith("[") ? `"${name}":${value.replace(/\d{16,}/g, '{"big":"$&"}')}` : `"${name}":{"big":"${value}"}`);
    return JSON.parse(kept, (_, value) => revived(value, blob));
}
function revived(value, blob) {
    if (value === null || typeof value !== "object")
        return value;
    if (typeof value.big === "string")
        return exact(value.big);
    if (!Array.isArray(value.array) || Object.keys(value).length !== 1)
        return value;
    const [type, shape, offset, size] = value.array;
    const data = READ[type](Uint8Array.prototype.slice.call(blob, offset, offset + size).buffer);
    return shape.length <= 1 ? data : new Matrix(shape, data);
}
function exact(digits) {
    const value = Number(digits);
    return Number.isSafeInteger(value) ? value : BigInt(digits);
}
/** A number of JSON, which has no infinities. */
export function numberOf(value) {
    return typeof value === "number" ? value : value === "nan" ? NaN : value === "inf" ? Infinity : -Infinity;
}
/** `maxTokens` as `max_tokens`. */
export function snake(name) {
    return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}
/** An object's names as `maxTokens`; what is inside stays. */
export function camelKeys(value) {
    const entries = Object.entries(value).map(([name, each]) => [name.replace(/_([a-z])/g, (_, l) => l.toUpperCase()), each]);
    return Object.fromEntries(entries);
}
