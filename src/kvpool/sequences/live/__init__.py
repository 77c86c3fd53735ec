"""What every operation on live sequences shares: their state, a sequence as its user sees it, batches, windows."""
