"""``python -m contaccum.cli``, for launchers that start a module."""

import sys

from contaccum.cli import main

sys.exit(main())
