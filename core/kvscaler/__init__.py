"""The brain of kvscaler: budget, admission, dispatch and scaling as pure functions."""

__version__ = "0.1.0"
