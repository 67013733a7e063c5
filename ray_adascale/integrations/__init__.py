"""Thin adapters for training loops that others own; each loads its library when it is imported, and no other does."""
