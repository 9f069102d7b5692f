"""Facts of a model's architecture that decide how much memory it needs."""
