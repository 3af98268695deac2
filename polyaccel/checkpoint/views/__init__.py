"""A checkpoint as a model sees it: under other names, or with values that a user made of it."""
