"""The HTTP server: OpenAI's API on the engine, and the middleware around it."""
