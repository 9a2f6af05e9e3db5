"""Watching: calls of collectives, the statuses that ranks publish, and the watchdog that names the missing rank."""
