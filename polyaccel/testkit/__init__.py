"""Tests for implementations of polyaccel's contracts, the built-in ones included: suites, and ranks to run them on."""
