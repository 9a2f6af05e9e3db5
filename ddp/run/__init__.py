"""From words to running workers: `settings/` reads them, `build/` makes components, `launch/` starts processes."""
