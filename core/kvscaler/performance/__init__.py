"""How long a step takes: a linear model of prefill and decode."""
