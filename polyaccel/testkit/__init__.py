"""For those who implement polyaccel's contracts, ourselves included: contract suites, and ranks to run them on."""
