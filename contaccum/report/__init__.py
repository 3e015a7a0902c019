"""`contaccum report`: reading outputs (sources), plots (panels) and one HTML page of them (page)."""

from contaccum.report.page import build_page
from contaccum.report.panels import Panel, comparison_panels, save_png
from contaccum.report.sources import Source, read_comparison

__all__ = ["Panel", "Source", "build_page", "comparison_panels", "read_comparison", "save_png"]
