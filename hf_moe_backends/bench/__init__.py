"""Measurements: what a backend costs, beside the others and in the same run."""
