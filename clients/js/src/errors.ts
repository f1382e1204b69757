// Errors: those of the engine have the name of their class there as `kind`.

/** What the engine refuses, with the value, the limit and the way out. */
export class HeadwayError extends Error {
  constructor(
    message: string,
    /** The class of the error in Headway: InvalidInput, ContextBusy, OutOfPages, … */
    readonly kind: string = "HeadwayError",
  ) {
    super(message);
    this.name = kind;
  }
}

/** The connection is lost for good, or was refused. */
export class ConnectionFailed extends HeadwayError {
  constructor(
    message: string,
    /** Why the server closed the session, as docs/protocol.md lists them. */
    readonly reason: string = "lost",
  ) {
    super(message, "ConnectionFailed");
  }
}
