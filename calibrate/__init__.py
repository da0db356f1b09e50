"""What a bundle costs on a device. Quantisation, acceptance profiles, tree planning: not yet."""
