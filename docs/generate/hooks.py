"""What mkdocs runs while it builds: pages and tables that are made from the project itself, so that they cannot lag."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from check_rows import check_rows
from cli_reference import cli_reference
from compatibility import compatibility
from config_reference import config_reference
from notes import notes
from support_table import support_table

MARKER = "<!-- support table -->"
SOURCE_LINK = re.compile(r"\[([\w.]+)\]\((?:\.\./)+((?:polyaccel|csrc|plugins)/[^)]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that no file holds."""
    files.append(File.generated(config, "reference/config.md", content=config_reference()))
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    files.append(File.generated(config, "compatibility.md", content=compatibility()))
    files.append(File.generated(config, "reference/check.md", content=check_rows()))
    files.append(File.generated(config, "reference/notes.md", content=notes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the support table where a page asks for it, and name source files, which the site does not have."""
    return SOURCE_LINK.sub(r"`\1` in `\2`", markdown.replace(MARKER, support_table()))
