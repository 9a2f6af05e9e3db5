"""Says what each number of workers has bought: the report of a sweep."""
