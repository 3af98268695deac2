"""Measurements of polyaccel beside its peers on one machine, in one sitting: `python -m bench`."""
