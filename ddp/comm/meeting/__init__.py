"""Meeting: ranks find each other, and each makes sure that the others are of the same launch."""
