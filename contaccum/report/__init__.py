"""`contaccum report`: reads outputs (sources), plots them (panels), writes an HTML page (page)."""

from contaccum.report.page import build_page
from contaccum.report.panels import Panel, comparison_panels, save_png
from contaccum.report.sources import Source, read_comparison

__all__ = ["Panel", "Source", "build_page", "comparison_panels", "read_comparison", "save_png"]
