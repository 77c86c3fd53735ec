"""SGLang's HiCache on the tiers of kvpool."""
