"""Trackers of other projects, ready to use as callbacks of a fit, or by name on the command line."""
