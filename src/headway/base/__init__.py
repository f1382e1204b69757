"""What every layer shares: errors, settings, value checks, masks, sampler and probe specs. Never imports torch."""
