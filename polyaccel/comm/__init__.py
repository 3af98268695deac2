"""Collectives: `init_distributed`, functions of torch.distributed's shape, the contract of backends (`base`)."""

from polyaccel.comm.default import default_communicator as default_communicator
from polyaccel.comm.default import is_initialized as is_initialized
from polyaccel.comm.default import set_default_communicator as set_default_communicator
from polyaccel.comm.functions import NON_MEMBER as NON_MEMBER
from polyaccel.comm.functions import NonMember as NonMember
from polyaccel.comm.functions import all_gather_into_tensor as all_gather_into_tensor
from polyaccel.comm.functions import all_gather_object as all_gather_object
from polyaccel.comm.functions import all_reduce as all_reduce
from polyaccel.comm.functions import all_to_all_single as all_to_all_single
from polyaccel.comm.functions import barrier as barrier
from polyaccel.comm.functions import broadcast as broadcast
from polyaccel.comm.functions import broadcast_object_list as broadcast_object_list
from polyaccel.comm.functions import get_global_rank as get_global_rank
from polyaccel.comm.functions import get_local_rank as get_local_rank
from polyaccel.comm.functions import get_rank as get_rank
from polyaccel.comm.functions import get_world_size as get_world_size
from polyaccel.comm.functions import irecv as irecv
from polyaccel.comm.functions import isend as isend
from polyaccel.comm.functions import new_group as new_group
from polyaccel.comm.functions import recv as recv
from polyaccel.comm.functions import reduce_scatter_tensor as reduce_scatter_tensor
from polyaccel.comm.functions import send as send
from polyaccel.comm.setup import connect as connect
from polyaccel.comm.setup import destroy_process_group as destroy_process_group
from polyaccel.comm.setup import init_distributed as init_distributed
from polyaccel.types import ReduceOp as ReduceOp
