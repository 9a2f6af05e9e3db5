"""From a command line to running workers, and back: the run's folder, their supervisor, reports of failures."""
