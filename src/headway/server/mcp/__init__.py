"""A client of MCP servers (Model Context Protocol), whose tools the model may call.

config      the operator's file: which servers there are, for which keys, and the hosts that requests may name
addresses   a host resolved once and checked: the address that is connected to
messages    JSON-RPC messages, tools and their results, checked and bounded
http        the transport of URLs (streamable HTTP), one connection for each message
stdio       the transport of commands: a process that runs as long as it behaves
servers     sessions with both, for one response

Nothing here knows of requests or models. A server that hangs, ends, or sends garbage or too much is an `McpError`.
"""
