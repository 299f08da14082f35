"""The dialects of HTTP: each turns a request into a `Chat` or a `Completion`, and its events into an answer."""
