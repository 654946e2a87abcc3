"""KV events: what the cache holds, published for routers."""
