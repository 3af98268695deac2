"""How ranks share the work, in integers only: the axes along which they stand, and the blocks of tensors they hold."""

from polyaccel.mesh.axes import Mesh, MeshAxis
from polyaccel.mesh.block import Block

__all__ = ["Block", "Mesh", "MeshAxis"]
