"""The keeper: a process next to the launcher that holds what ranks give it while the ranks are started again."""
