"""The HTTP APIs: a folder for each, beside the modules that they share."""
