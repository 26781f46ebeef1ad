"""A research team over a folder of real text."""
