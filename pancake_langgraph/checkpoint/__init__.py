"""Where checkpoints live: the strict codec, content-addressed elements, and the stores."""
