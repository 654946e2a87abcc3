"""Families with experts in place of MLPs."""
