"""The command line: kvscaler plan, and the same as kubectl kvscaler."""
