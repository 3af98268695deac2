"""The engines that torch users hold."""
