"""Where pages go that leave the pool's prefix cache: host memory, then a folder."""
