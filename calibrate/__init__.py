"""Quantisation, and what a bundle costs on a device. Tree planning: not yet."""
