"""Pictures as SVG: a schedule's rounds, and the timeline of a step."""
