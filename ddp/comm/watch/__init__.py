"""Watching: calls of collectives, what ranks publish of them, and the watchdog that names who is missing."""
