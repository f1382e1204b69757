// Attention masks: what rows attend to, symbolically. A rule's function runs here, and its rows travel as runs.
import { HeadwayError } from "./errors.js";
/** What each row attends to. Masks combine with `and`, `or` and `not`. */
export class Mask {
    rule;
    constructor(rule) {
        this.rule = rule;
    }
    /** Every earlier slot. */
    static causal() {
        return new Mask(["causal"]);
    }
    /** The last n slots, the row's own among them. */
    static window(n) {
        return new Mask(["window", n]);
    }
    /** The first `sink` slots and the last `window`. */
    static sink(sink, window) {
        return new Mask(["sink", sink, window]);
    }
    /** Blocks that see themselves, and those that `sees` names as [viewer, seen]. */
    static blocks(lengths, sees = []) {
        return new Mask(["blocks", [...lengths], [...sees]]);
    }
    /** Raw runs, one list a row: zeros first, 0 = attend, 1 = masked. */
    static fromRuns(rows) {
        return new Mask(["raw", [...rows].map((row) => flipped([...row])), "runs", false]);
    }
    /** One list of booleans a row: whether it attends to each slot. */
    static fromBool(attend) {
        const rows = [...attend];
        return new Mask(["raw", rows.map(runsOf), "booleans", rows.every((row) => row.length === rows[0].length)]);
    }
    /** Whatever a function says of the row's position id and those of the slots. */
    static rule(attends) {
        return new Mask(attends);
    }
    and(other) {
        return new Mask(["all", [this.rule, other.rule]]);
    }
    or(other) {
        return new Mask(["either", [this.rule, other.rule]]);
    }
    not() {
        return new Mask(["not", this.rule]);
    }
    /** Whether it has a function, which is asked for the rows before the mask is sent. */
    get needsPositions() {
        return hasFunction(this.rule);
    }
    /** The mask as the protocol has it. */
    json(places = null) {
        return json(this.rule, places);
    }
}
function hasFunction(rule) {
    if (typeof rule === "function")
        return true;
    if (rule[0] === "not")
        return hasFunction(rule[1]);
    return (rule[0] === "all" || rule[0] === "either") && rule[1].some(hasFunction);
}
function json(rule, places) {
    if (typeof rule === "function")
        return ["rows", rowsOf(rule, places)];
    if (rule[0] === "not")
        return ["not", json(rule[1], places)];
    if (rule[0] === "all" || rule[0] === "either")
        return [rule[0], rule[1].map((part) => json(part, places))];
    return rule;
}
function rowsOf(attends, { positions, first, rows, whole }) {
    return Array.from({ length: rows }, (_, row) => {
        const slot = first + row;
        const seen = whole === undefined || slot < whole ? positions.slice(0, slot + 1) : positions;
        const bits = attends(positions[slot], seen);
        if (bits.length !== seen.length) {
            throw new HeadwayError(`the mask's rule gave ${bits.length} values for ${seen.length} slots; give one for each`, "InvalidMask");
        }
        return [positions[slot], runsOf(bits)];
    });
}
/** Bits as alternating runs, zeros first. */
export function runsOf(bits) {
    const runs = [0];
    let last = false;
    for (let i = 0; i < bits.length; i++) {
        const bit = Boolean(bits[i]);
        if (bit !== last) {
            runs.push(0);
            last = bit;
        }
        runs[runs.length - 1]++;
    }
    return runs;
}
function flipped(runs) {
    return runs[0] === 0 ? runs.slice(1) : [0, ...runs];
}
