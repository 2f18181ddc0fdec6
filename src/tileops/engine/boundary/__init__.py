"""The compile boundary: one opaque torch operator per side-effect branch, generated from an entry."""
