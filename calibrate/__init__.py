"""Quantisation, acceptance and cost profiles, tree planning: empty so far."""
