"""Timings against peers: every row is a ratio, both sides measured in turns in one
run."""
