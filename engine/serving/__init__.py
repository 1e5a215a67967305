"""Serves several requests with one engine: a queue, conversations, an HTTP server."""
