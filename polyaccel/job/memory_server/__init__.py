"""The keeper: a process beside the launcher that holds what ranks give it while the ranks are started again."""
