"""The sidecar: a paged engine behind an OpenAI server, with admission and an admin API."""
