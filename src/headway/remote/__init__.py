"""The same API over a network: `hw.connect` gives an engine whose passes are computed by a server.

It needs neither torch nor numpy (arrays are numpy's where it is installed). `docs/protocol.md` has the messages.
"""
