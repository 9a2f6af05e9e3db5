"""Says what each number of workers has bought: the report of a sweep, and `scale`, which runs a short one."""
