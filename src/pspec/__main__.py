"""``python -m pspec``."""

from pspec.cli import main

main()
