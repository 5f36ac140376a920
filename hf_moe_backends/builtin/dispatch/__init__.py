"""Dispatchers: how tokens reach the ranks of their experts, and how the outputs come back."""
