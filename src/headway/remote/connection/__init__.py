"""The client's connection: frames, numbered messages, and who waits for them."""
