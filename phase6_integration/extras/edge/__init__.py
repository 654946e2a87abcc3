"""The edge: connections, TLS, API keys, and the limits of what clients may send and have in memory."""
