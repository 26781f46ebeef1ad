"""Agent memory: vectors and documents of many agents, searched by similarity, kept on disk."""
