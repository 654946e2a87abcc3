"""/api/chat, /api/generate and what there is of the model, as Ollama has them, over the chat of the core."""
