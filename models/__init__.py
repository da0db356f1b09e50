"""PyTorch definitions: target families, the parallel drafter, checkpoint readers."""
