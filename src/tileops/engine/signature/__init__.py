"""From an entry to checked parameters, canonical keys and generated checks."""
