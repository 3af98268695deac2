"""Parameters whose values are recorded but not computed: `zero.Init`."""
