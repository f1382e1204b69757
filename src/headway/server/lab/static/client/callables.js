// What a program gives a generation and keeps here: its own constraint, drafter and hooks, called for the server.
import { HeadwayError } from "./errors.js";
/** The objects of one connection, by number; those that the server names, copies, have negative ones. */
export class Callables {
    newNumber;
    objects = new Map();
    constructor(newNumber) {
        this.newNumber = newNumber;
    }
    add(thing) {
        const number = this.newNumber();
        this.objects.set(number, thing);
        return number;
    }
    drop(numbers) {
        for (const number of numbers)
            this.objects.delete(number);
    }
    /** Do what the server asks. */
    async call({ method, object, args }, generation) {
        const thing = this.objects.get(object);
        if (thing === undefined)
            throw new HeadwayError("the program has let go of what the server asks for", "Unsupported");
        switch (method) {
            case "follow":
                follow(thing, args[0]);
                return state(thing);
            case "copy":
                follow(thing, args[1]);
                this.objects.set(args[0], thing.copy());
                return null;
            case "draft":
                return [Array.from(await thing.draft(Array.from(args[0]), args[1])), null, null, 0, 0.7];
            case "accept":
                return thing.accept(Array.from(args[0]));
            case "logits":
                return changed(thing, args[0], args.length > 1 ? { generated: args[2] } : generation);
            default:
                throw new HeadwayError(`the server asks for ${method}, which this client does not know`, "Unsupported");
        }
    }
}
function follow(constraint, since) {
    for (const [verb, value] of since)
        constraint[verb](value);
}
function state(constraint) {
    return {
        mask: constraint.mask(),
        forced: constraint.forced?.() ?? [],
        may_end: constraint.mayEnd ?? true,
        finished: constraint.finished ?? false,
    };
}
async function changed(hook, logits, generation) {
    return (await hook(logits, generation)) ?? logits;
}
