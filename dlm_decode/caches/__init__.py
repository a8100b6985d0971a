"""Cache policies."""
