"""Meeting: ranks find each other, and each checks that the others belong to the same launch."""
