"""The demo: a traffic spike scales a real model by its KV budget, with proof at the end."""
