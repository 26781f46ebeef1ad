"""Reading graphs: what a compiled graph declares about who runs after whom."""
