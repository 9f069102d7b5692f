"""Signals with their age, and windows of traffic statistics."""
