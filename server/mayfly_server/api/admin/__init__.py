"""Routes for operators: health probes, metrics, and the status of all workers as JSON and as a
live web page."""
