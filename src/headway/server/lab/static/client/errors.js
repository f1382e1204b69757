// Errors: those of the engine have the name of their class there as `kind`.
/** What the engine refuses, with the value, the limit and the way out. */
export class HeadwayError extends Error {
    kind;
    constructor(message, 
    /** The class of the error in Headway: InvalidInput, ContextBusy, OutOfPages, … */
    kind = "HeadwayError") {
        super(message);
        this.kind = kind;
        this.name = kind;
    }
}
/** The connection is lost for good, or was refused. */
export class ConnectionFailed extends HeadwayError {
    reason;
    constructor(message, 
    /** Why the server closed the session, as docs/protocol.md lists them. */
    reason = "lost") {
        super(message, "ConnectionFailed");
        this.reason = reason;
    }
}
