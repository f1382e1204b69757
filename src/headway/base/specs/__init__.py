"""What a pass or a generation asks for, as data: samplers, probes, masks, adapters, the generation parameters."""
