"""The manifest language: files, entries, expressions. Imports no torch."""
