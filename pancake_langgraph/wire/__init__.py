"""The OpenAI-compatible wire form, without I/O: reading streams, naming errors, laying out requests."""
