"""Runnable programs written with tileops; none is part of the installed package."""
