"""SmolLM2-135M-Instruct, with its real weights, written from tileops operators.

Run it with ``python -m examples.smollm "Name three primary colors."``.
"""
