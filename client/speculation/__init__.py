"""Guesses of the next tokens, and what is in flight of them. Pure: nothing here knows of sessions or sockets."""
