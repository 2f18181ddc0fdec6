"""Readers of what each stage of torch.compile tells."""
