"""What a page of the book runs in the browser's tab, in a worker, over the repository's own modules."""
