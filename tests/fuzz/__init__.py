"""Every parser of bytes that strangers send, and two ways to feed them: Hypothesis and atheris (`make fuzz`)."""
