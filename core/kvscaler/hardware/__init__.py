"""Facts of accelerators: memory, bandwidth and peak rates, each with its source."""
