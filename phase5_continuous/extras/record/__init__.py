"""The record of a run: written by an observer, kept in a file, and run again."""
