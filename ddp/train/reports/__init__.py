"""Reports of a run: on the terminal, in its folder, and to trackers."""
