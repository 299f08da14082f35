"""Authenticated, encrypted channels between peers, and the carriers below them."""
