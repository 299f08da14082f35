"""The side of a distributed model that `transformers` sees. It runs in the caller's thread and blocks."""
