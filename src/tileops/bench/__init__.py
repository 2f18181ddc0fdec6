"""Measurements that belong to the library: ``python -m tileops.bench host``."""
