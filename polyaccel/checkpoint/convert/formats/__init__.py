"""The file formats of other tools, a module each: some are written, some are read, most both."""
