"""Measurements: each prints its ceiling, what was measured and their ratio, and can end in JSON."""
