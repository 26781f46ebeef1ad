"""Two agents and a handoff."""
