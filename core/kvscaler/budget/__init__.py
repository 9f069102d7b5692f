"""From model, accelerator and engine to KV bytes, blocks and footprints."""
