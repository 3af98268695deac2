"""Plain values and small services that everything stands on: types, buffers, the mesh, deadlines, private files.

It imports nothing of polyaccel but its errors.
"""
