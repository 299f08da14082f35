"""The carriers of channels, each kind in a file of its own."""
