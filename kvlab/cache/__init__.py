"""Block pools, block tables, KV tensors and transfers between tiers."""
