"""Prints the modules that are imported in its process."""

import sys


def main() -> None:
    """Print them, one a line."""
    print(*sorted(sys.modules), sep="\n")
