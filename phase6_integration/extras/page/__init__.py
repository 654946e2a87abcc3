"""The playground, a page in the browser."""
