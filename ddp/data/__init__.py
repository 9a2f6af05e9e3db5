"""Data sets, the samplers that share them out, and the loaders that fetch them."""
