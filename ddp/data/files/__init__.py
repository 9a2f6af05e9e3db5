"""Samples in files: their index, where they are read from, and how they are decoded."""
