"""The process and its machine: clock, log, files, memory, terminal, GPU and random streams."""
