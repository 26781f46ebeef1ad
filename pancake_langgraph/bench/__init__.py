"""Benches and their one result format."""
