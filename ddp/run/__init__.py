"""From words to running workers: `settings/` reads them, `assembly/` makes components, `launch/` starts processes."""
