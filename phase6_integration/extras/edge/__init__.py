"""The edge: connections, TLS, API keys, and limits on what clients may send and keep in memory."""
