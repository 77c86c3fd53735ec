"""Tiers over a network: Redis or Valkey, S3, Mooncake. Each node has a breaker; probes run in the background."""
