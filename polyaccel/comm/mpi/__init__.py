"""MPI in this process: the library, calls under way, the end of a job whose rank fails, and the rendezvous."""
