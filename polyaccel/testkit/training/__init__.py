"""Specifications of training: a step's interpreter, small models with hand-written gradients."""
