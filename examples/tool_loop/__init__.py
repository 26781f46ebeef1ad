"""One agent with a tool loop."""
