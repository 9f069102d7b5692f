"""A discrete-event fleet around the same code. Empty until it is built."""
