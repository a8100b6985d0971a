"""Schedules: which window of a row is eligible, and when it moves."""
