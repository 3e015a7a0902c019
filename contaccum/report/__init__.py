"""The HTML page of `contaccum fit`."""
