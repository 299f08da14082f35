"""What carries channels, each kind in a file of its own."""
