"""Pancake."""
