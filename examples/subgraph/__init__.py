"""A graph inside a graph."""
