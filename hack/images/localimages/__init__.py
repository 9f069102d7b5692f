"""Builds the project's images without a registry and gives a cluster the layers that it lacks."""
