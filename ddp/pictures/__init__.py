"""Pictures as SVG: a schedule's rounds, the timeline of a step, an epoch's order."""
