"""Messages between operator, router and sidecar: limits, state, drain."""
