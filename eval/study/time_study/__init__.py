"""The study by time: its plan, its runs, and its tables."""

import sys
from pathlib import Path

# For `comparison`, which starts the runs of this study and chooses their rates too.
sys.path.append(str(Path(__file__).resolve().parents[2] / "compare"))
