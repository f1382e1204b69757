"""The HTTP server: OpenAI's face on the engine, and the walls around it."""
