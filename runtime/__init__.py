"""Bundles run: engines, cache, token tree, acceptance, generation. Never imports torch."""
