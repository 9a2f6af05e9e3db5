"""From a command line to running workers, and back: the run's folder, torchrun's engine, what is said of failures."""
