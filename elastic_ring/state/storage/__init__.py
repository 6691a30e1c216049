"""Files on a file system or in an object store."""
