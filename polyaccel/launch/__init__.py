"""The launcher: starts the ranks of a job, shows what they print, and ends all of them when one fails."""
