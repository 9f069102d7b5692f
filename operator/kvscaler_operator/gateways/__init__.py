"""The only modules that talk to something outside the process: API server, Prometheus, sidecars."""
