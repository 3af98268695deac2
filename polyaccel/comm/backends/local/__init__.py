"""The backend `local`: one process, or ranks as threads."""
