"""The HTTP server: OpenAI's API, and a web page."""
