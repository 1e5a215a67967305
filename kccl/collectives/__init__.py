"""The collectives of a communicator, one in each file: what their arguments mean."""
