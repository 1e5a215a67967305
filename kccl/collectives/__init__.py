"""The collectives of a communicator, each a file: what its arguments mean."""
