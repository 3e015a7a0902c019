"""Entry point of ``python -m contaccum.cli``, for launchers that start a module."""

from contaccum.cli import main

raise SystemExit(main())
