"""Targets by model family, as `modeling_<family>.py` has the built-in ones."""
