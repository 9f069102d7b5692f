"""A fleet that only pretends, around an operator that does not: what `bench/fleet_tick.py` and
`bench/idle.py` measure it in."""
