"""KV cache servers: the port (`base`), the adapters, and how to make one (`registry`)."""
