"""Measurements against peers and baselines, one JSON line per figure."""
