"""The speed-up of each number of workers: the report of a sweep, and `scale`, which runs a short one."""
