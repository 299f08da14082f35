"""The version, and nothing else: setup.cfg reads it without importing the package."""

__version__ = "0.2.dev0"
