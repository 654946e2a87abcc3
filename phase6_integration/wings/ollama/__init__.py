"""/api/chat, /api/generate and /api/tags, as Ollama has them, over the chat of the core."""
