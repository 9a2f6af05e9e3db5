"""The process and its machine: a clock, a log, files, memory, a terminal, its GPU, and its random streams."""
