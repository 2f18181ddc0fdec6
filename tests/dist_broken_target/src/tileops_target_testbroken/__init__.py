"""Cannot be imported."""

raise OSError("libtestbroken.so.1: cannot open shared object file")
