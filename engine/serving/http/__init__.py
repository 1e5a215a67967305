"""The server: OpenAI's API, and a page."""
