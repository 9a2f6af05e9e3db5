"""Measures, predicts and reports. The registry of commands names its verbs, and nothing in ddp imports it."""
