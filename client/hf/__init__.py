"""What `transformers` sees of a distributed model. Everything here runs in the caller's thread and blocks."""
