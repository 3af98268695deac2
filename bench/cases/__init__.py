"""Cases: what each benchmark builds and compares, a file each."""
