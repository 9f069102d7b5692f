"""The admin API: limits and drain, behind signed tokens."""
