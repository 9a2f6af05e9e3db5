"""Forecasts a profiled step on other ranks, hosts and links."""
