"""What an operator sees: logs, metrics, health, and the model's own routes."""
