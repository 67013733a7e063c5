"""Thin adapters for the training loops of other libraries. Each module imports its
library; no other module does.
"""
