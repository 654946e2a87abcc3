"""/openapi.json: every field, status and header of the API."""
