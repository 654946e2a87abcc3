"""The course: the book's chapters, and `python -m chapters`, the tool that checks them and runs the exercises."""
