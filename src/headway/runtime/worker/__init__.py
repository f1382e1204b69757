"""Parts of the loop's worker thread that need none of its bookkeeping."""
