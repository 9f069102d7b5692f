"""Kernels of the engine, each with formula, launcher and torch reference."""
