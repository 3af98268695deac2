"""The backend `ccl`: Intel's oneCCL."""
