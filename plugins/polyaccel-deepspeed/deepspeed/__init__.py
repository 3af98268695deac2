"""DeepSpeed's names over polyaccel, by the polyaccel project; this is not Microsoft's DeepSpeed.

Every module below this one is made from the table `polyaccel_deepspeed.names.surface`, when it is first asked for.
"""

from polyaccel_deepspeed import origin as _origin
from polyaccel_deepspeed.names import modules as _modules
from polyaccel_deepspeed.version import __version__ as __version__
from polyaccel_deepspeed.version import __version_major__ as __version_major__
from polyaccel_deepspeed.version import __version_minor__ as __version_minor__
from polyaccel_deepspeed.version import __version_patch__ as __version_patch__
from polyaccel_deepspeed.version import git_branch as __git_branch__  # noqa: F401
from polyaccel_deepspeed.version import git_hash as __git_hash__  # noqa: F401

_origin.refuse_mixture(__path__[0])
_modules.install()
__getattr__, __dir__ = _modules.accessors(__name__)
