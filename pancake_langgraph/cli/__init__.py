"""The command `pancake`."""
