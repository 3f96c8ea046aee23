"""The files of an index: private to their user, locked to one program, some of them SQLite's."""
