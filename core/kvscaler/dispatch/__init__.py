"""The fleet's queue and placement. Empty until the router is built."""
