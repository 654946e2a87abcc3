"""Every state of a small engine: the world that is explored, what must hold in it, the search, and its stories."""
