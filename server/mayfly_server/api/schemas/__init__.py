"""What answers look like, for the OpenAPI document alone: answers are made by hand, and nothing
checks them while it serves. The tests do."""
