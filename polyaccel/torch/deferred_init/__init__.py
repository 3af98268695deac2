"""Parameters whose values are known but not computed: `zero.Init`."""
