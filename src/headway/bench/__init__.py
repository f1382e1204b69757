"""What `headway bench` measures: an engine's speed, its overhead per step, and a server under load."""
