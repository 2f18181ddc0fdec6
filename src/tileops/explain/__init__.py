"""What torch.compile did with a function: collected, told as data, shown three ways."""
