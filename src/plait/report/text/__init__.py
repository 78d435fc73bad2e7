"""The answer about one layout, for people: a page of text out of the REPORT of `build.py`."""

from plait.report.text.page import render

__all__ = ["render"]
