"""The elastic agent of a host, which is torch's: a process beside the launcher."""
