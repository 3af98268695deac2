"""Where the operations and the time of a model are: a tree of its modules, as a table and as a picture."""
