"""The settings of a training: which of them fit, how fast they are estimated to be, and trials that find the best."""
