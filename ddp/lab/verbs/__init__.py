"""Holds the commands of the laboratory."""
