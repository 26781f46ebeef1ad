"""Code that runs inside LMCache's server: storage adapters that serve only what they can prove to be right."""
