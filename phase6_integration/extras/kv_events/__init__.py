"""KV events: the content of the cache, published for routers."""
