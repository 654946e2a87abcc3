"""Wings: parts of the server that can be taken off. A wing imports the core, and no other wing."""
