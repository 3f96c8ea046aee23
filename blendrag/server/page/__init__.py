"""The page at ``/v1/kb/ui``: static files, which ask the routes beside them with the key that is typed in."""
