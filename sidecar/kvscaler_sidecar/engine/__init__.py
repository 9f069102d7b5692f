"""The live engine: a thread that steps, and what it exchanges with the HTTP loop."""
