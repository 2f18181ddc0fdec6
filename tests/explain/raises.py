"""Scripts that go wrong, for the command."""


def after_a_break(x):
    y = x + 1
    print("before")
    raise ValueError(f"no luck with {tuple(y.shape)}")


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def exits(x):
    y = x + 1
    raise SystemExit(0 * y.dim())


net = Scaled(2)
net.first = Scaled(3)
