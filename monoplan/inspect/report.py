"""The report: one HTML file that needs nothing else, no network and no server."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoplan.codegen.text import comment_text
from monoplan.inspect.report_data import report_data
from monoplan.ir.errors import writing

if TYPE_CHECKING:
    from monoplan.built import Built
    from monoplan.inspect.profile import Profile

ASSETS = Path(__file__).resolve().parent / "report_assets"
SCRIPTS = ("layout.js", "graph.js", "charts.js", "report.js")


def write_report(path: Path, built: Built, profiles: Mapping[str, Profile]) -> Path:
    """Writes the page; folders on the way are made."""
    page = render_report(report_data(built, profiles))
    with writing("the report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")
    return path


def render_report(data: Mapping[str, Any]) -> str:
    """The page for some data."""
    page = (ASSETS / "report.html").read_text(encoding="utf-8")
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # Inside a script element `</script` and `<!--` would not be text.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(f"{comment_text(data['name'])} for {data['target']} · monoplan")
    parts = {"@TITLE@": title, "@STYLE@": style, "@SCRIPT@": script, "@DATA@": text}
    # In one pass: a name may hold a mark.
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], page)
