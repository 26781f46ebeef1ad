"""Parallel workers and a join."""
