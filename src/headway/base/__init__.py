"""Values that every layer shares: errors, settings, runs and masks, sampler and probe specs. Imports no torch."""
