"""Phase 6, serving: the engine, the HTTP server, the command line. Only the command line is built yet."""
