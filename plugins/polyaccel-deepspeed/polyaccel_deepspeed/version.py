"""The version that clients compare, and what DeepSpeed's `git_version_info` reports of an installation."""

__version__ = "0.19.8+polyaccel.0.1.0"
"""That of the DeepSpeed whose names these are, then polyaccel's own."""

__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
git_hash = git_branch = "[none]"
installed_ops: dict[str, bool] = {}
"""Empty: nothing is compiled at installation."""
accelerator_name = ""
torch_info = {"version": "0.0", "cuda_version": "0.0", "nccl_version": "0.0", "hip_version": "0.0"}
"""DeepSpeed's value for "unknown": readers ask torch then."""
