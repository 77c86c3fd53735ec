"""From logits to text: parameters, tokens, beams, drafts, stop strings."""
