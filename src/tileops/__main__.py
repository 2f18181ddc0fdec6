"""``python -m tileops``: the ``tileops`` command."""

import sys

from tileops.cli import main

sys.exit(main())
