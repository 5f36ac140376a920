"""Experts backends in plain torch, for every layout that Transformers has."""
