"""What was measured, on which machine, and the page that shows it. Takes plain dicts; knows no other room."""

from __future__ import annotations

from drafthouse.measure.machine import collect_machine
from drafthouse.measure.report import render, write_report
from drafthouse.measure.report_schema import Report, ReportError, parse_report

__all__ = ["Report", "ReportError", "collect_machine", "parse_report", "render", "write_report"]
