"""A report for a terminal and for a browser."""
