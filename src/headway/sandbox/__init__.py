"""Programs that somebody else wrote, confined: in WebAssembly, or in a process under bubblewrap.

A worker process of its own starts every program in a child of its own, so that neither can harm the engine's process.
All that a program has of it is a session, the same as that of any client (`docs/protocol.md`). `docs/programs.md` has
the promises, each with its test.
"""
