"""What a paged engine decides, without tensors: blocks, prefixes, steps, admission."""
