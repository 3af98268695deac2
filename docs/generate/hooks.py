"""What mkdocs runs while it builds: tables that are made from the project itself, so that they cannot lag."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from check_rows import check_rows
from cli_reference import cli_reference
from compatibility import compatibility
from config_reference import config_reference
from notes import notes

TABLES = {made.__name__: made for made in (check_rows, cli_reference, compatibility, config_reference, notes)}
PART = re.compile(r"<!-- docs/generate/(\w+)\.py: begin -->\n.*?<!-- docs/generate/\1\.py: end -->", re.DOTALL)
"""Where a page has tables that are made from the project, with what the repository shows in their place."""
SOURCE_LINK = re.compile(r"\[([\w.]+)\]\((?:\.\./)+((?:polyaccel|csrc|plugins)/[^)]+)\)")
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]*")
BREAK = re.compile(r"([._/,=])(?=[A-Za-z_]|(?<!\d\.)\d)")
OPTION = re.compile(r"(?<![\w-])--[\w-]+")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables in, and name source files, which the site does not have."""
    return SOURCE_LINK.sub(r"`\1` in `\2`", PART.sub(lambda part: TABLES[part[1]](), markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let code in tables break after a dot, a slash, an underscore and a comma, but not inside of an option."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: breakable(code[0]), cell[0]), html)


def breakable(code: str) -> str:
    return OPTION.sub(r'<span class="option">\g<0></span>', BREAK.sub(r"\1<wbr>", code))
