"""OpenAI's Responses API, Anthropic's Messages API and Ollama's API, as translations of the core's chat."""
