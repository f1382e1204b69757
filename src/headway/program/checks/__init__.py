"""Checks of what callers give: ids and positions, samplers and probes, and a pass against its context."""
