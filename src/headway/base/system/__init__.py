"""This process and its machine: devices, memory, optional packages, logging, the garbage collector."""
