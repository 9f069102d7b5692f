"""Gate mode: a reverse proxy with admission, before another engine in the same Pod."""
