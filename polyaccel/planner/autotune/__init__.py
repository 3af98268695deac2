"""The settings of a training: which of them fit, how fast they are foretold to be, and trials that find the best."""
