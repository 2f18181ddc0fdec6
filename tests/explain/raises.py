"""Scripts that go wrong, for the command."""


def after_a_break(x):
    y = x + 1
    print("before")
    raise ValueError(f"no luck with {tuple(y.shape)}")
