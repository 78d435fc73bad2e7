"""The answer about one layout as one page for a browser, out of the REPORT of `build.py`."""

from plait.report.html.page import page

__all__ = ["page"]
