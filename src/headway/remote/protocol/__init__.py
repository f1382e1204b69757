"""Both sides' reading and writing of messages: bytes, values, the numbers they agree on (`docs/protocol.md`)."""
