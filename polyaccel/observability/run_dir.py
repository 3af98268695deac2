"""The files of a run's folder that several modules speak of."""

from __future__ import annotations

RUN_FILE = "run.json"
"""The `run_metadata`, the number of ranks, and when the run was last started."""
METRICS_FILE = "metrics.jsonl"
"""Rank 0's steps, figures of the user's own, alarms."""
RANKS_FOLDER = "ranks"
"""Below it: `N.jsonl` with the steps of rank N, from 1 on, and `N.log.jsonl` with its warnings and errors."""
MOST_RANK_FILES = 256
"""Ranks that write their own files: more than a user looks at, and few enough for a file server."""
LOG_FILE = "log.jsonl"
"""A JSON object a line, with `time` (seconds since 1970), `level` and `text`; `state` where the run has begun
("running") and at its end ("ended", "failed")."""
TRACE_FILE = "trace.json"
REPORT_FILE = "report.html"
"""The page of the run, frozen at its end."""
