"""The book: a Sphinx site of the chapters, the notebooks and the sources that they quote. `make book` builds it."""
