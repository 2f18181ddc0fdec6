"""A report for a terminal."""
