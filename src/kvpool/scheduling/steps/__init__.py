"""One step: who takes part, which tokens, as flat arrays; and what its results change."""
