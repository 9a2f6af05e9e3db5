"""The settings of a run: their types, defaults and meanings, and every check that needs no data."""
