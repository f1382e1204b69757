"""Functions of arrays on the host, in numpy: what the native path needs besides the native library. Never torch."""
